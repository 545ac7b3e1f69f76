"""Download a repository for a process without secrets: `python -m ndif.runtime.weights.fetch SPEC RULES`.

Downloading a gated model takes a token, and a process that runs untrusted code must hold none. So this
process downloads the files and ends before the first request, or when its standard input is closed. It
prints JSON lines: the repositories deleted to make room, its progress in bytes, and finally the
`RepositoryFacts` or the failure. It imports neither torch nor transformers: their import takes longer than
the download of a small model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    errors,
    snapshot_download,
    try_to_load_from_cache,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from ndif.runtime.process.children import end_with_input
from ndif.runtime.sizing import RepositoryFacts
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError, sentence
from ndif.runtime.typed_json import from_json, to_json
from ndif.runtime.weights.cache import CacheRules, make_room, record_use

HUB_TIMEOUT_S = 10.0
_CONFIG = "config.json"
_NO_MODEL = "{} has no config.json on {}: it is no model that transformers can load."


def explain_unavailable(spec: ModelSpec, error: BaseException) -> str:
    """Return a sentence with the reason why a model cannot be loaded or measured."""
    name = repr(spec.checkpoint)
    at = f" at revision {spec.revision!r}" if spec.revision else ""
    cause: BaseException | None = error
    chain = []
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__

    def is_one_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in chain)

    if spec.is_folder and not os.path.exists(os.path.join(spec.checkpoint, "config.json")):  # noqa: PTH110, PTH118 - an operator's name, unchanged
        return f"The folder {name} holds no config.json: it is not a checkpoint's folder."
    if is_one_of(errors.HFValidationError):
        return f"{name} is neither a folder on this machine nor the name of a repository."
    host = urlsplit(_endpoint()).netloc
    if is_one_of(errors.GatedRepoError):
        return (
            f"{name} is gated, and this server has no token with access to it: accept its terms on "
            f"{host}, and set HF_TOKEN."
        )
    if is_one_of(errors.RevisionNotFoundError):
        return f"{name} has no revision {spec.revision!r} on {host}."
    if is_one_of(errors.RepositoryNotFoundError):
        return f"There is no repository {name} on {host} that this server may read."
    # Compared by name: versions of huggingface_hub use different HTTP libraries.
    bases = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    if "TransportError" in bases or is_one_of(
        errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled
    ):
        return (
            f"{name}{at} is not in this machine's cache, and {host} cannot be reached. Download it "
            "first, or give a folder."
        )
    if is_one_of(errors.EntryNotFoundError):
        return _NO_MODEL.format(f"{name}{at}", host)
    if not spec.trust_remote_code and "trust_remote_code" in str(error):
        return (
            f"{name} comes with code of its own. If you trust it, deploy it with trust_remote_code."
        )
    # transformers always names the default hub, even if another one is configured.
    return sentence(error).replace(constants._HF_DEFAULT_ENDPOINT, _endpoint())


def unavailable(spec: ModelSpec) -> str | None:
    """Return the reason why this server cannot get a model from the hub; None if it can, or need not.

    The call blocks for one request at most.
    """
    if spec.is_folder or constants.is_offline_mode() or _is_on("HF_HUB_OFFLINE"):
        return None
    try:
        info = HfApi(endpoint=_endpoint()).model_info(
            spec.checkpoint, revision=spec.revision, timeout=HUB_TIMEOUT_S
        )
    except errors.HfHubHTTPError as error:
        return None if is_here(spec, _CONFIG, spec.revision) else explain_unavailable(spec, error)
    except Exception:
        return None  # the hub is unreachable; the files may be in the cache of the process that reads them
    if info.siblings is None or any(sibling.rfilename == _CONFIG for sibling in info.siblings):
        return None
    return _NO_MODEL.format(repr(spec.checkpoint), urlsplit(_endpoint()).netloc)


def _is_on(variable: str) -> bool:
    """Return True if an environment variable is true, by the rules of huggingface_hub."""
    return os.environ.get(variable, "").upper() in constants.ENV_VARS_TRUE_VALUES


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


class UnreadableError(UserFacingError):
    """The server's user lacks the permission to read files of a checkpoint's folder."""


def require_readable(spec: ModelSpec) -> None:
    """Raise an UnreadableError if the server's user may not read needed files of a checkpoint's folder.

    The errors of transformers in this case do not mention permissions.
    """
    if not spec.is_folder:
        return
    folder = Path(spec.checkpoint)
    try:
        present = [file.name for file in folder.iterdir() if file.is_file()]
        names = needed(present, own_code=spec.trust_remote_code)
        refused = [name for name in sorted(names) if not os.access(folder / name, os.R_OK)]
    except PermissionError:
        refused = ["any file"]
    if refused:
        shown = ", ".join(refused[:_MAX_NAMED]) + (", …" if len(refused) > _MAX_NAMED else "")
        raise UnreadableError(
            f"The user who runs the server may not read {shown} in {spec.checkpoint!r}. Permit it, for "
            "example with `chmod -R a+rX FOLDER`."
        )


_MAX_NAMED = 3
"""Most files that an error names."""
_REPORT_INTERVAL_S = 0.05
_WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
)
"""The names of files of weights; transformers loads the first kind that a repository has."""
_UNUSED = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ot|tflite|npz|mlmodel|pkl|zip|gz|tar"
    r"|png|jpe?g|gif|webp|svg|mp4|wav|pdf)|\.gitattributes"
)
"""Weights in formats for other programs, and files that no program reads."""
_ADAPTER = "adapter_config.json"
"""A file that would make transformers load another model, with an adapter on top of it."""
_PARTIAL = ".incomplete"
"""Suffix of a file that is being downloaded to the Hub's cache; each process uses its own file."""
_TEMPLATES = "additional_chat_templates/"
_OWN_CODE = ("config.json", "tokenizer_config.json", "processor_config.json")
"""Files that can name classes of another repository."""


class PickledError(UserFacingError):
    """A repository has only pickled weights, which this server does not read."""


def main(spec: ModelSpec, rules: CacheRules) -> None:
    """Download the model's files and print its facts, or print the failure and exit with code 1."""
    try:
        print(to_json(_provide(spec, rules)).decode(), flush=True)
    except Exception as error:
        traceback.print_exc()
        _report(failed=explain_unavailable(spec, error))
        raise SystemExit(1) from error


def _report(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def _provide(spec: ModelSpec, rules: CacheRules) -> RepositoryFacts:
    """Download the model's missing files and return its facts; if the hub fails, use cached files."""
    try:
        info = HfApi().model_info(
            spec.checkpoint, revision=spec.revision, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
    except Exception:
        if not is_here(spec, "config.json", spec.revision):
            raise
        return RepositoryFacts(str(cached_folder(spec)))
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    names = needed(sizes, own_code=spec.trust_remote_code)
    require_permitted(spec, names)
    missing = sum(sizes[name] for name in names if not is_here(spec, name, info.sha))
    # Checked before the download: a full disk affects more than this model.
    if missing and (deleted := make_room(spec.checkpoint, missing, rules)):
        _report(deleted=deleted)
    folder = snapshot_download(
        spec.checkpoint, revision=spec.revision, allow_patterns=names, tqdm_class=_ProgressBar
    )
    if spec.trust_remote_code:
        for repository in code_of_others(Path(folder)):
            snapshot_download(repository, allow_patterns="*.py")
            record_use(repository)
    return RepositoryFacts(folder, info.id, info.pipeline_tag, is_gated(info))


def discard_partial() -> None:
    """Delete the partial downloads of this process, which huggingface_hub would not resume."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == _PARTIAL:
                file.unlink()


def is_gated(info: ModelInfo) -> bool:
    """Return True if the hub gives a repository's files only to permitted accounts."""
    return bool(info.gated or info.private)


def cached_folder(spec: ModelSpec) -> Path:
    """Return the folder of a checkpoint's files, which must be on this machine."""
    if spec.is_folder:
        return Path(spec.checkpoint)
    config = try_to_load_from_cache(spec.checkpoint, "config.json", revision=spec.revision)
    return Path(config).parent if isinstance(config, str) else spec.files


def needed(sizes: Collection[str], *, own_code: bool) -> list[str]:
    """Return the files that loading reads: without the usual files of weights, all but `_ADAPTER`."""
    weights = _usual_weights(sizes)
    if not weights:
        return [name for name in sizes if name != _ADAPTER]
    small = [
        name
        for name in sizes
        if not _UNUSED.fullmatch(name)
        and name != _ADAPTER
        and ("/" not in name or name.startswith(_TEMPLATES) or (own_code and name.endswith(".py")))
    ]
    return weights + small


def _usual_weights(names: Collection[str]) -> list[str]:
    kinds = ([name for name in names if kind.fullmatch(name)] for kind in _WEIGHTS)
    return next(filter(None, kinds), [])


def weights_of(names: Collection[str]) -> list[str]:
    """Return the names of the files from which transformers may load weights."""
    others = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    return _usual_weights(names) or others


def require_permitted(spec: ModelSpec, names: Collection[str]) -> None:
    """Raise a PickledError if one of these files is a pickle and `spec` permits none."""
    pickles = sorted(name for name in names if _WEIGHTS[1].fullmatch(name))
    if pickles and not spec.pickled:
        raise PickledError(
            f"{spec.checkpoint!r} has its weights only as pickles ({pickles[0]}), and reading a pickle can "
            "run code. Ask its author for safetensors; the server's operator can allow pickled weights "
            "(NDIF_ALLOW_PICKLED_WEIGHTS)."
        )


def is_here(spec: ModelSpec, name: str, revision: str | None) -> bool:
    """Return True if the Hub's cache holds a file of a repository."""
    try:
        path = try_to_load_from_cache(spec.checkpoint, name, revision=revision)
    except errors.HFValidationError:  # the path of a missing folder is not the name of a repository
        return False
    return isinstance(path, str)


def code_of_others(folder: Path) -> set[str]:
    """Return the other repositories whose classes the configs name, as in "owner/name--module.Class"."""
    repositories = set()
    for file in (folder / name for name in _OWN_CODE):
        config = json.loads(file.read_text()) if file.exists() else {}
        for named in config.get("auto_map", {}).values():
            classes = named if isinstance(named, list) else [named]
            repositories |= {name.partition("--")[0] for name in classes if name and "--" in name}
    return repositories


class _ProgressBar(tqdm):  # type: ignore[misc]
    """A progress bar that reports bytes to the host and draws nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reported_at = 0.0
        self._null = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open as long as the bar
        super().__init__(*args, **{**kwargs, "file": self._null, "disable": False})

    def update(self, count: float | None = 1) -> bool | None:
        drawn: bool | None = super().update(count)
        now = time.monotonic()
        if (
            self.unit == "B"
            and self.total
            and (now - self._reported_at > _REPORT_INTERVAL_S or self.n >= self.total)
        ):
            self._reported_at = now
            _report(done=int(self.n), total=int(self.total))
        return drawn


if __name__ == "__main__":
    end_with_input(discard_partial)
    main(from_json(ModelSpec, sys.argv[1]), from_json(CacheRules, sys.argv[2]))
