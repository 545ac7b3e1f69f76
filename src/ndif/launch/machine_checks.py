"""Checks of a machine before a server starts on it: its present and missing parts, and the remedies.

`preflight` refuses a start for the same reasons; these checks also report successes.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ndif.config.groups import FolderSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.distribution import install_command
from ndif.host.gpus import Driver, DriverError, select_visible
from ndif.host.runtimes import SUPPORTED, Runtimes
from ndif.launch.access import access_problems, access_warning, describe_keys
from ndif.launch.run_folder import RunFolders
from ndif.launch.services.plan import SERVICES, addresses, contradictions, secret_problems
from ndif.launch.services.service import ServiceError, disk_space_problem
from ndif.net import StartError, listen
from ndif.sandbox.confinement.confinement import holds_packages
from ndif.sizes import format_size
from ndif.stores.disk import free_bytes

_CUDA = re.compile(r"^cuda\b[^=]*= *'(\d+)\.(\d+)'", re.MULTILINE)
_DRIVER_TIMEOUT_S = 20.0

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    """`note`: a server starts, but may lack something; `problem`: it does not start, or not as intended."""
    detail: str


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a machine, as its driver reports them."""

    names: tuple[str, ...] = ()
    """Names of the GPUs that a server uses."""
    notes: tuple[str, ...] = ()
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports."""


def check_machine(options: Settings) -> list[Check]:
    """Return every check of this machine."""
    checkers: tuple[Callable[[Settings], Iterator[Check]], ...] = (
        _python,
        _compiled_modules,
        _gpus,
        _runtimes,
        _disks,
        _services,
        _ports,
        _access,
    )
    return [check for checker in checkers for check in checker(options)]


def _python(_: Settings) -> Iterator[Check]:
    yield Check("Python", "ok", platform.python_version())
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if not holds_packages(Path(entry)):
            yield Check(
                "PYTHONPATH",
                "note",
                f"{entry} holds more than installed packages: untrusted code can read only the files in it "
                "that a model process has loaded, and the modules of NDIF_WHITELIST",
            )


def _compiled_modules(_: Settings) -> Iterator[Check]:
    """Check that torch has bytecode on disk or that Python may write it; many containers fail this."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return
    folder = Path(spec.origin).parent
    if sys.dont_write_bytecode or not os.access(folder, os.W_OK):
        yield Check(
            "Python",
            "note",
            "torch is not compiled, and Python keeps no compiled modules here: each process that "
            "imports it takes seconds longer. "
            f"Run `{sys.executable} -m compileall -q -j 0 {folder.parent}`",
        )


def _gpus(_: Settings) -> Iterator[Check]:
    torch, cuda = torch_build()
    if torch is None:
        yield Check("torch", "problem", f"not installed: run `{install_command('torch')}`")
        return
    try:
        machine = asyncio.run(_query_driver())
    except DriverError as error:
        yield check_torch(torch, cuda, Gpus())
        state: State = "note" if error.absent else "problem"
        why = "no NVIDIA driver is loaded" if error.absent else str(error)
        yield Check("GPUs", state, f"none, models run on CPUs: {why}")
        return
    yield check_torch(torch, cuda, machine)
    if machine.driver:
        yield Check("NVIDIA driver", "ok", f"{machine.driver}, for CUDA {_dotted(machine.cuda)}")
    yield Check(
        "GPUs",
        "ok" if machine.names else "note",
        ", ".join(machine.names) or "none that a server uses: models run on CPUs",
    )
    yield from (Check("GPUs", "note", note) for note in machine.notes)


def check_torch(torch: str, cuda: tuple[int, int] | None, machine: Gpus) -> Check:
    """Check that a build of torch fits a machine's GPUs and driver."""
    build = f"{torch}, for CUDA {_dotted(cuda)}" if cuda else f"{torch}, for CPUs only"
    if machine.names and cuda is None:
        return Check("torch", "problem", f"{build}: install a build for CUDA, or no GPU is used")
    # A driver runs every build of its own major version of CUDA, and of older ones.
    if machine.names and cuda and machine.cuda and machine.cuda[0] < cuda[0]:
        return Check(
            "torch",
            "problem",
            f"{build}, and driver {machine.driver} is for CUDA {_dotted(machine.cuda)} and older: renew "
            "the driver, or install an older build of torch",
        )
    return Check("torch", "ok", build)


def _dotted(version: tuple[int, int] | None) -> str:
    return "of unknown version" if version is None else f"{version[0]}.{version[1]}"


def torch_build() -> tuple[str | None, tuple[int, int] | None]:
    """Return the versions of torch and of its CUDA, without importing torch; None if missing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
        match = _CUDA.search(text)
        return metadata.version("torch"), (int(match[1]), int(match[2])) if match else None
    except (OSError, metadata.PackageNotFoundError):
        return "of unknown version", None


async def _query_driver() -> Gpus:
    driver = Driver(_DRIVER_TIMEOUT_S)
    try:
        gpus, failures = await driver.physical_gpus()
        version, cuda = await driver.versions()
    finally:
        await driver.close()
    visible = select_visible(gpus, os.environ)
    names = tuple(f"{gpu.name} ({format_size(gpu.usable_bytes)})" for gpu in visible.gpus)
    return Gpus(names, (*failures, *visible.notes), version, cuda)


def _runtimes(options: FolderSettings) -> Iterator[Check]:
    installed = Runtimes(options.runtimes).installed()
    if not installed:
        yield Check("nnsight", "problem", f"not installed: run `{install_command('nnsight')}`")
    for generation in SUPPORTED:
        if generation in installed:
            yield Check(f"nnsight {generation}", "ok", installed[generation].version)
        elif installed:
            how = f"not installed, for its clients run `ndif runtime add {generation}`"
            yield Check(f"nnsight {generation}", "note", how)


def _disks(options: FolderSettings) -> Iterator[Check]:
    # Imported here: only this check needs it.
    from huggingface_hub import constants

    for name, folder, content, variable in (
        ("disk: sessions", options.root, "Sessions and results", name_of("session_root")),
        ("disk: models", Path(constants.HF_HUB_CACHE).absolute(), "Models", "HF_HOME"),
    ):
        problem = disk_space_problem(folder, content, variable)
        free = f"{folder} has {format_size(free_bytes(folder))} free"
        yield Check(name, "problem" if problem else "ok", problem or free)


def _services(options: Settings) -> Iterator[Check]:
    if not addresses(options):
        yield Check("services", "ok", "none are configured: one process, files on this machine")
    yield from (Check("services", "problem", text) for text in contradictions(options, "all"))
    for name, address in addresses(options).items():
        try:
            service = SERVICES[name][0](options, may_start=True)
        except ServiceError as error:
            yield Check(name, "problem", str(error))
        else:
            how = "answers" if service is None else "`ndif start` starts it"
            yield Check(name, "ok", f"{address}: {how}")
            if name == "broker":
                starts = () if service is None else (service,)
                problems = secret_problems(options, starts)
                yield from (Check("cluster's secret", "problem", text) for text in problems)


def _ports(options: Settings) -> Iterator[Check]:
    running = RunFolders(options.session_root).running()
    ports = [("127.0.0.1", options.api_port, "api_port")]
    if options.admin_port is not None:
        ports.append((options.admin_host, options.admin_port, "admin_port"))
    for host, port, setting in ports:
        name = f"port {port}"
        if running is not None and port in (running[1].port, running[1].admin_port):
            yield Check(name, "ok", f"used by the server that runs here (process {running[1].pid})")
            continue
        try:
            listen(host, port, f"Choose another with {name_of(setting)}.").close()
        except StartError as error:
            yield Check(name, "problem", str(error))
        else:
            yield Check(name, "ok", "free")


def _access(options: Settings) -> Iterator[Check]:
    problems = list(access_problems(options))
    yield from (Check("API keys", "problem", text) for text in problems)
    if problems:
        return
    form, warning = describe_keys(options), access_warning(options)
    yield Check(
        "API keys",
        "ok" if form and not warning else "note",
        warning
        or form
        or f"none ({name_of('api_keys')}): everybody who reaches the server may use it",
    )
