"""`python -m ndif.runtime.fetch SPEC`: have a repository's files here, for a process without secrets.

What downloads a gated model holds a token, and what runs strangers' code must not: so another process
does it, which ends before the first of them comes. It prints JSON lines: how far it is in bytes, and last
what only a hub knows of the model: its name there, and its task. It needs neither torch nor transformers,
whose imports take longer than a small model's download.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tqdm import tqdm  # type: ignore[import-untyped]

from ndif.runtime import hub
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import SaidError

_EVERY_S = 0.05
_WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
)
"""The files that transformers takes the weights from: the first kind that there is."""
_OF_NO_USE = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ot|tflite|npz|mlmodel|pkl|zip|gz|tar"
    r"|png|jpe?g|gif|webp|svg|mp4|wav|pdf)|\.gitattributes"
)
"""Weights for others, and what no program reads."""
_TEMPLATES = "additional_chat_templates/"
_OWN_CODE = ("config.json", "tokenizer_config.json", "processor_config.json")
"""Files that can name classes of another repository."""


class NoSpaceError(SaidError):
    """A model does not fit on the disk."""


def main(spec: ModelSpec) -> None:
    """Download what loading the model needs, and tell what is known of it, or why it is not to be had."""
    try:
        tell(**have(spec))
    except Exception as error:
        traceback.print_exc()
        tell(failed=hub.why(spec, error))
        raise SystemExit(1) from error


def tell(**said: Any) -> None:
    """One line to the host."""
    print(json.dumps(said), flush=True)


def have(spec: ModelSpec) -> dict[str, Any]:
    """Have its files here, and what a hub knows of it; where none answers, what is here has to do."""
    try:
        found = hub.ask(spec, sizes=True)
    except Exception:
        if not _is_here(spec, "config.json", spec.revision):
            raise
        return {"repo_id": None, "task": spec.task}
    fetch(spec, found)
    # Before 0.8 there were no tasks.
    task = spec.task or (found.pipeline_tag if spec.generation == "0.8" else None)
    return {"repo_id": found.id, "task": task}


def fetch(spec: ModelSpec, found: Any) -> None:
    """Download what is missing.

    Raises:
        NoSpaceError: before the first byte, if it has no room.
    """
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    names = needed(sizes, own_code=spec.trust_remote_code)
    _check(sum(sizes[name] for name in names if not _is_here(spec, name, found.sha)))
    folder = snapshot_download(
        spec.checkpoint, revision=spec.revision, allow_patterns=names, tqdm_class=Bar
    )
    if spec.trust_remote_code:
        for repository in _code_of_others(Path(folder)):
            snapshot_download(repository, allow_patterns="*.py")


def needed(sizes: Collection[str], *, own_code: bool) -> list[str]:
    """The files that loading a repository with these reads: all of them, where it has a way of its own."""
    kinds = ([name for name in sizes if kind.fullmatch(name)] for kind in _WEIGHTS)
    weights = next(filter(None, kinds), None)
    if weights is None:
        return list(sizes)
    small = [
        name
        for name in sizes
        if not _OF_NO_USE.fullmatch(name)
        and ("/" not in name or name.startswith(_TEMPLATES) or (own_code and name.endswith(".py")))
    ]
    return weights + small


def _check(missing: int) -> None:
    cache = Path(constants.HF_HUB_CACHE).absolute()
    free = shutil.disk_usage(next(each for each in (cache, *cache.parents) if each.exists())).free
    # A disk that is full in the middle stops more than this model.
    if missing > free:
        raise NoSpaceError(
            f"{missing / 1e9:,.1f} GB of it are to be downloaded, and the disk that they would go to has "
            f"{free / 1e9:,.1f} GB free: free some, or set HF_HOME to a folder on a larger one."
        )


def _is_here(spec: ModelSpec, name: str, revision: str | None) -> bool:
    try:
        found = try_to_load_from_cache(spec.checkpoint, name, revision=revision)
    except HFValidationError:  # a folder that is not here is not the name of a repository
        return False
    return isinstance(found, str)


def _code_of_others(folder: Path) -> set[str]:
    """The repositories of which this one names classes: "owner/name--module.Class"."""
    found = set()
    for file in (folder / name for name in _OWN_CODE):
        said = json.loads(file.read_text()) if file.exists() else {}
        for named in said.get("auto_map", {}).values():
            classes = named if isinstance(named, list) else [named]
            found |= {one.partition("--")[0] for one in classes if one and "--" in one}
    return found


class Bar(tqdm):  # type: ignore[misc]
    """Counts bytes, and draws nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._told = 0.0
        self._nowhere = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for as long as it is
        super().__init__(*args, **{**kwargs, "file": self._nowhere, "disable": False})

    def update(self, count: float | None = 1) -> bool | None:
        """Count; tell it now and then, and when all is done."""
        drawn: bool | None = super().update(count)
        now = time.monotonic()
        if (
            self.unit == "B"
            and self.total
            and (now - self._told > _EVERY_S or self.n >= self.total)
        ):
            self._told = now
            tell(done=int(self.n), total=int(self.total))
        return drawn


if __name__ == "__main__":
    main(ModelSpec.of(json.loads(sys.argv[1])))
