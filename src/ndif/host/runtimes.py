"""The nnsight generations with which model processes can be started."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from packaging.tags import parse_tag, sys_tags
from packaging.utils import canonicalize_name
from packaging.version import Version

from ndif.distribution import install_command
from ndif.errors import NdifError
from ndif.host.installer import (
    Installer,
    InstallError,
    Package,
    by_uv_or_pip,
    find_uv,
    has_pip,
)

SUPPORTED: Mapping[str, str] = {
    "0.8": "nnsight>=0.8,<0.9",
    "0.7": "nnsight>=0.7,<0.8",
    "0.6": "nnsight>=0.6.3,<0.7",
}
"""The requirement that is installed, by generation; the newest generation first."""

# `nnsight.ndif` imports requests, which only an extra of python-socketio installs.
_UNDECLARED: Mapping[str, tuple[str, ...]] = {"0.7": ("requests",), "0.6": ("requests",)}

# A second torch is gigabytes and two sets of CUDA libraries; a second transformers, other models.
_SHARED = frozenset({"torch", "transformers"})

_UNFINISHED = ".unfinished-"


class RuntimesError(NdifError):
    """A runtime cannot be added or removed; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """An interpreter with one nnsight."""

    generation: str
    """"0.8"."""
    version: str
    """"0.8.1"."""
    interpreter: Path
    path: tuple[Path, ...]
    """Folders that go first on PYTHONPATH; none for the nnsight installed with ndif."""


def generation_of(version: str) -> str | None:
    """Return the generation of a version, "0.8" for "0.8.1"; None if it is no version."""
    try:
        release = Version(version).release
    except ValueError:  # also raised for thousands of digits, which a client may send
        return None
    return f"{release[0]}.{release[1]}" if len(release) > 1 else None


def how_to_add(generation: str) -> str:
    """Return a sentence that says how to add a generation, or lists the supported ones."""
    if generation in SUPPORTED:
        return f"`ndif runtime add {generation}` adds it."
    return f"ndif serves nnsight {', '.join(SUPPORTED)}."


def pins(packages: Sequence[Package], installer: str) -> list[str]:
    """Return exact requirements; raise a `RuntimesError` for packages that a runtime shares with ndif."""
    for name, version in packages:
        if canonicalize_name(name) in _SHARED:
            raise RuntimesError(
                f"{installer} would bring {name} {version}, but a runtime shares the "
                f"{name} of ndif, and the one in {sys.prefix} is missing or too old for "
                "this nnsight: install one there that suits both, then add the runtime again"
            )
    return [f"{name}=={version}" for name, version in packages]


class Runtimes:
    """The nnsight installed with ndif, and a folder of overlays with other generations.

    An overlay holds nnsight and the packages that are missing here; torch, transformers and the rest come
    from ndif's environment. A folder gets a generation's name once it is complete.
    """

    def __init__(self, folder: Path) -> None:
        # Absolute, because a model process may be started in another working folder.
        self.folder = folder.absolute()

    def installed(self) -> dict[str, Runtime]:
        """Return every runtime that is ready for use, by generation; the base runtime comes first."""
        base = _base_runtime()
        runtimes = {base.generation: base} if base else {}
        for generation in SUPPORTED:
            if generation not in runtimes and (
                overlay := self._find_overlay(self.folder / generation)
            ):
                runtimes[generation] = overlay
        return runtimes

    def add(self, generation: str, tell: Callable[[str], None]) -> Runtime:
        """Install a generation; pass the installer's output line by line to `tell`."""
        if generation not in SUPPORTED:
            raise RuntimesError(
                f"there is no runtime {generation!r}; ndif serves nnsight {', '.join(SUPPORTED)}"
            )
        if find_uv() is None and not has_pip():
            raise RuntimesError(
                f"runtimes are installed with uv or pip, and {sys.prefix} has neither: run "
                f"`{install_command('pip')}` or `{sys.executable} -m ensurepip` first"
            )
        with self._changing() as unfinished:
            self._raise_if_installed(generation)
            requirements = [SUPPORTED[generation], *_UNDECLARED.get(generation, ())]

            def install(installer: Installer) -> Path:
                tell(f"Looking for {SUPPORTED[generation]}")
                wanted = pins(installer.missing(requirements, tell), installer.name)
                overlay = unfinished / installer.name / generation
                installer.install_into(overlay, wanted, tell)
                if self._find_overlay(overlay) is None:
                    raise InstallError(
                        f"{installer.name} installed {', '.join(wanted)}, which is incomplete"
                    )
                return overlay

            try:
                overlay = by_uv_or_pip(install, tell)
            except InstallError as error:
                raise RuntimesError(str(error)) from error
            target = self.folder / generation
            if target.exists():  # incomplete, or for another Python
                target.rename(unfinished / "replaced")
            overlay.rename(target)
        return self.installed()[generation]

    def remove(self, generation: str) -> None:
        """Delete an installed generation, unless it is installed with ndif."""
        installed = self.installed()
        runtime = installed.get(generation)
        if runtime is None:
            raise RuntimesError(
                f"there is no runtime {generation!r} to remove; installed: {', '.join(installed)}"
            )
        if not runtime.path:
            raise RuntimesError(
                f"nnsight {runtime.version} is the one that ndif itself is installed with; "
                "only runtimes that were added can be removed"
            )
        with self._changing() as unfinished:
            # The folder is renamed first, so that a half-deleted runtime is never found.
            (self.folder / generation).rename(unfinished / generation)

    def _raise_if_installed(self, generation: str) -> None:
        runtime = self.installed().get(generation)
        if runtime is None:
            return
        if not runtime.path:
            raise RuntimesError(
                f"nnsight {runtime.version} is already there: ndif is installed with it"
            )
        raise RuntimesError(
            f"nnsight {runtime.version} is already installed in {runtime.path[0]}; "
            f"to reinstall it, run `ndif runtime remove {generation}` first"
        )

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Path]:
        """Lock the overlays, and yield a scratch folder beside them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RuntimesError(
                    f"another `ndif runtime` is changing {self.folder}; wait until it is done"
                ) from error
            for leftover in self.folder.glob(f"{_UNFINISHED}*"):
                rmtree(leftover, ignore_errors=True)
            with TemporaryDirectory(
                prefix=_UNFINISHED, dir=self.folder, ignore_cleanup_errors=True
            ) as scratch:
                yield Path(scratch)

    def _find_overlay(self, folder: Path) -> Runtime | None:
        """Return the runtime in `folder`; None if it is incomplete or for another Python."""
        for distribution in metadata.distributions(name="nnsight", path=[str(folder)]):
            if (
                generation_of(distribution.version) == folder.name
                and _is_complete(distribution)
                and _suits_python(distribution)
            ):
                return Runtime(
                    folder.name, distribution.version, Path(sys.executable), path=(folder,)
                )
        return None


def _base_runtime() -> Runtime | None:
    try:
        version = metadata.version("nnsight")
    except metadata.PackageNotFoundError:
        return None
    generation = generation_of(version)
    return Runtime(generation, version, Path(sys.executable), path=()) if generation else None


def _is_complete(distribution: metadata.Distribution) -> bool:
    # Bytecode may be deleted at any time, and scripts are not where they are recorded.
    files = [
        file
        for file in distribution.files or ()
        if file.parts[0] == "nnsight" and file.suffix != ".pyc"
    ]
    return bool(files) and all(Path(str(file.locate())).is_file() for file in files)


def _suits_python(distribution: metadata.Distribution) -> bool:
    """Return True if compiled parts are for this Python, which may have changed since the installation."""
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag:").strip() for line in lines if line.startswith("Tag:")]
    ours = frozenset(sys_tags())
    return any(not ours.isdisjoint(parse_tag(tag)) for tag in tags)
