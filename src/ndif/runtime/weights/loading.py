"""The confined reading of a checkpoint: its files are untrusted data and must not lead to other files."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import transformers.pipelines  # noqa: F401 - on this import, torch creates a folder for its cache
from huggingface_hub import _snapshot_download, constants

from ndif.runtime.process.isolation import operator_modules
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError
from ndif.runtime.weights.fetch import cached_folder, code_of_others
from ndif.runtime.weights.repository import require_harmless
from ndif.sandbox.confinement.confinement import WEIGHTS, DriverFiles, Mode, checkpoint_paths
from ndif.sandbox.confinement.limits import limit_memory, limited_memory
from ndif.sandbox.confinement.loading import LoadingConfinement
from ndif.sizes import format_size

Result = TypeVar("Result")

_BASE_BYTES = 4 << 30
_BYTES_PER_BYTE = 8
"""Bytes of memory that loading may take per byte of weights: 4-bit weights may become 32-bit ones."""
_MEMORY_MESSAGES = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "bad_alloc")

_REFUSED = re.compile(r"Permission denied|Operation not permitted|PermissionError")
"""Messages of Python, Rust and the C library when the kernel denies access."""

_FINDS_ADAPTERS = (
    "transformers.pipelines",
    "transformers.integrations.peft",
    "transformers.models.auto.auto_factory",
)
"""Modules of transformers that look for an adapter beside a model."""
_FINDER = "find_adapter_config_file"
_LISTING = "read_tree_cache"
"""The function of huggingface_hub that reads the list of a repository's files."""


class OutsideError(UserFacingError):
    """Loading a model needs access to files or other resources outside its repository."""


class TooLargeError(UserFacingError):
    """Loading a model takes more memory than its weights explain."""


def read_confined(
    spec: ModelSpec,
    read: Callable[[], Result],
    *,
    whole: bool = False,
    driver: DriverFiles | None = None,
) -> Result:
    """Call `read` confined to a checkpoint's files, and return its result.

    Args:
        spec: The checkpoint, whose files are on this machine.
        read: Loads the checkpoint.
        whole: True to confine this process and its later forks permanently; else only a reading thread.
        driver: Files of a GPU's driver that this process has started; None on CPUs.

    Raises:
        UserFacingError: If the files are harmful, or loading them needs more access or memory.
    """
    untrusted = spec.untrusted
    mode: Mode = "best-effort" if untrusted is None else untrusted.sandbox
    readable = _readable(spec)
    if untrusted is not None and whole:
        adapters = Path(untrusted.adapters)
        adapters.mkdir(parents=True, exist_ok=True)
        readable += [adapters, *operator_modules(untrusted)]
        readable += [Path(untrusted.whitelist)] if untrusted.whitelist else []
    weights = [file for file in spec.files.rglob("*") if file.suffix in WEIGHTS]
    size = sum(file.stat().st_size for file in weights if file.is_file())
    most_bytes = _BASE_BYTES + _BYTES_PER_BYTE * size
    if untrusted is not None and whole and mode != "off":
        limit_memory(most_bytes + untrusted.memory_bytes)
    # No limit with a driver: the large address ranges that the driver maps would count.
    limit = contextlib.nullcontext() if driver is not None else limited_memory(most_bytes)
    code = folders_of_code(spec)
    try:
        with (
            LoadingConfinement.prepare(
                mode, readable, code, whole=whole, driver=driver
            ) as confinement,
            limit,
        ):
            return confinement.run(lambda: _read_checked(spec, read))
    except UserFacingError:
        raise
    except Exception as error:
        # The message of a transformers pipeline contains the errors of all classes that it tried.
        text = f"{type(error).__name__}: {error}"
        if refused := next(filter(_REFUSED.search, text.splitlines()), None):
            raise OutsideError(
                f"{spec.checkpoint!r} cannot be loaded: it needs files outside its own ({refused.strip()})."
            ) from error
        if any(message in text for message in _MEMORY_MESSAGES):
            raise TooLargeError(
                f"Loading {spec.checkpoint!r} took more than {format_size(most_bytes)} of memory, and its "
                f"weights have {format_size(size)}: its config describes another model than its files."
            ) from error
        raise


def _read_checked(spec: ModelSpec, read: Callable[[], Result]) -> Result:
    """Call `read` if the checkpoint's files name no other files; return its result."""
    require_harmless(spec.files, remote_code=spec.trust_remote_code, pickled=spec.pickled)
    with _offline(), _without_listing(), _without_adapter():
        return read()


def _readable(spec: ModelSpec) -> list[Path]:
    paths = checkpoint_paths(spec.files)
    if spec.trust_remote_code:
        for repository in code_of_others(spec.files):
            paths += checkpoint_paths(cached_folder(ModelSpec(repository, spec.generation)))
    return paths


def folders_of_code(spec: ModelSpec) -> list[Path]:
    """Return the folder for copies of a repository's code, in a list; [] if the code is not trusted.

    The first call creates it for this process and its later forks, so that models do not share code.
    """
    if not spec.trust_remote_code:
        return []
    from transformers import dynamic_module_utils

    if not _code:
        _code.append(Path(tempfile.mkdtemp(prefix="ndif-code-")))
        dynamic_module_utils.HF_MODULES_CACHE = str(_code[0])
    return [*_code]


_code: list[Path] = []
"""The folder that this process has created for code, if any."""


def remove_code() -> None:
    """Remove the folder for copies of a repository's code."""
    while _code:
        shutil.rmtree(_code.pop(), ignore_errors=True)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Prevent requests to the hub, which the confinement blocks; the files are on this machine."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _without_listing() -> Iterator[None]:
    """Hide the list of a repository's files from huggingface_hub, which cannot open it.

    With the list, the snapshot would seem incomplete, because unneeded files are not downloaded.
    """
    before = getattr(_snapshot_download, _LISTING, None)
    if before is None:  # an older library keeps no lists
        yield
        return
    setattr(_snapshot_download, _LISTING, lambda *_: None)
    try:
        yield
    finally:
        setattr(_snapshot_download, _LISTING, before)


@contextlib.contextmanager
def _without_adapter() -> Iterator[None]:
    """Hide an adapter among a model's files from transformers, because it names another model to load.

    Adapters are applied per request instead.
    """
    modules = [sys.modules[name] for name in _FINDS_ADAPTERS if name in sys.modules]
    before = [getattr(module, _FINDER) for module in modules]
    for module in modules:
        setattr(module, _FINDER, lambda *_, **__: None)
    try:
        yield
    finally:
        for module, finder in zip(modules, before, strict=True):
            setattr(module, _FINDER, finder)
