"""Whether a repository's weights have room on the disk that they are downloaded to."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache

from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import SaidError

_PATIENCE_S = 10.0
_WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
)
"""The files that transformers takes the weights from: the first kind that there is."""


class NoSpaceError(SaidError):
    """A model does not fit on the disk; the message says what to do."""


def check(spec: ModelSpec) -> None:
    """See that what is still to be downloaded has room; where no hub answers nothing is.

    A disk that is full in the middle stops more than this model.

    Raises:
        NoSpaceError: if it has not.
    """
    missing = 0 if spec.is_folder else _missing(spec)
    free = shutil.disk_usage(_existing(Path(constants.HF_HUB_CACHE))).free
    if missing > free:
        raise NoSpaceError(
            f"{missing / 1e9:,.1f} GB of it are to be downloaded, and the disk that they would go to has "
            f"{free / 1e9:,.1f} GB free: free some, or set HF_HOME to a folder on a larger one."
        )


def _missing(spec: ModelSpec) -> int:
    """Bytes of weights that are not in the cache."""
    try:
        found = HfApi().model_info(
            spec.checkpoint, revision=spec.revision, files_metadata=True, timeout=_PATIENCE_S
        )
    except Exception:  # whatever it is, loading says it, unless all is here
        return 0
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    return sum(
        sizes[name]
        for name in _weights(sizes)
        if not isinstance(try_to_load_from_cache(spec.checkpoint, name, revision=found.sha), str)
    )


def _weights(names: Iterable[str]) -> list[str]:
    kinds = ([name for name in names if kind.fullmatch(name)] for kind in _WEIGHTS)
    return next(filter(None, kinds), [])


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())
