"""Detection of a machine's confinement layers, and confinement without one of them.

A kernel without a layer is simulated by a filter that returns the errors of such a kernel.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ndif.distribution import NAME
from ndif.sandbox.confinement.confinement import Confinement, ConfinementError, Mode, verify
from ndif.sandbox.confinement.layers import Layer, detect_layers, missing_layers
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
LANDLOCK, SECCOMP = "Landlock: files", "seccomp: system calls"
REQUIRED = next(line for line in metadata.requires(NAME) or () if line.startswith("landlock"))

_LAUNCHER = """
import errno, os, sys
import pyseccomp as seccomp
rules = seccomp.SyscallFilter(seccomp.ALLOW)
missing = sys.argv[1].split("+")
if "landlock" in missing:
    for name in ("create_ruleset", "add_rule", "restrict_self"):
        rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "landlock_" + name)
if "seccomp" in missing:
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "seccomp")
    rules.add_rule(seccomp.ERRNO(errno.EINVAL), "prctl", seccomp.Arg(0, seccomp.EQ, 22))
rules.load()
os.execv(sys.argv[2], sys.argv[2:])
"""


def without(missing: str, *command: str | Path) -> list[str]:
    """Return a command on a kernel without `missing`: "landlock", "seccomp", both with a plus, or ""."""
    launcher = [sys.executable, "-c", _LAUNCHER, missing] if missing else []
    return [*launcher, *map(str, command)]


def without_package(folder: Path, name: str, error: str) -> dict[str, str]:
    """Return an environment in which a package cannot be imported."""
    (folder / f"{name}.py").write_text(f"raise {error}\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def of(layers: list[Layer], name: str) -> Layer:
    return next(layer for layer in layers if layer.name == name)


# A program that reports the layers, or the outcomes of a confined fork.


def _outcome(run: Callable[[], object]) -> str:
    try:
        run()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


def _read() -> None:
    Path("/etc/passwd").read_text()


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


ATTEMPTS: dict[str, Callable[[], object]] = {
    "read": _read,
    "write": lambda: os.write(3, b""),
    "fork": _fork,
    "chroot": lambda: os.chroot("/"),
    "execute": lambda: os.execv("/bin/true", ["true"]),
}
BY_FILES, BY_CALLS = {"read", "execute"}, {"fork", "chroot", "execute"}


def _confined(mode: Mode) -> dict[str, Any]:
    try:
        confinement = Confinement.prepare(
            mode, readable=[], memory_bytes=1 << 30, result_bytes=0, max_threads=64
        )
    except ConfinementError as error:
        return {"refused": str(error)}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            channel = confinement.detach(writing)
            confinement.apply()
            outcomes = {name: _outcome(run) for name, run in ATTEMPTS.items()}
        except ConfinementError as error:
            outcomes = {"refused": str(error)}
        os.write(channel, json.dumps(outcomes).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(content or b'{"said": "nothing"}')
    return answer


def main() -> None:
    if sys.argv[1] == "layers":
        layers = detect_layers()
        print(json.dumps({layer.name: [layer.present, layer.detail] for layer in layers}))
    else:
        print(json.dumps(_confined(sys.argv[1])))  # type: ignore[arg-type]


def run(kernel: str, subject: str, environment: dict[str, str] | None = None) -> Any:
    process = subprocess.run(
        without(kernel, sys.executable, "-m", "tests.sandbox.confinement.test_layers", subject),
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


# Detection.


def test_detect_layers_reports_every_layer_once() -> None:
    layers = detect_layers()
    names = [layer.name for layer in layers]
    assert len(names) == len(set(names))
    assert all(layer.detail for layer in layers)
    required = [layer.name for layer in layers if layer.required]
    assert required == [
        LANDLOCK,
        SECCOMP,
        "no new privileges, no capabilities",
        "limits: memory, files, core",
    ]


def test_missing_layers_are_required_and_absent() -> None:
    layers = [
        Layer(f"{present} {required}", present, required, "")
        for present in (True, False)
        for required in (True, False)
    ]
    assert [layer.name for layer in missing_layers(layers)] == ["False True"]


@pytest.mark.parametrize(
    ("abi", "rights"),
    [
        (1, ["files"]),
        (2, ["files"]),
        (3, ["files", "truncation"]),
        (4, ["files", "truncation", "TCP"]),
        (5, ["files", "truncation", "TCP", "device ioctls"]),
        (6, ["files", "truncation", "TCP", "device ioctls", "signals and abstract sockets"]),
        (99, ["files", "truncation", "TCP", "device ioctls", "signals and abstract sockets"]),
    ],
)
def test_landlock_version_determines_present_layers(
    monkeypatch: pytest.MonkeyPatch, abi: int, rights: list[str]
) -> None:
    # A filter cannot return an ABI version, so an older kernel is simulated by a patch.
    monkeypatch.setattr("ndif.sandbox.confinement.landlock.abi", lambda: abi)
    layers = [layer for layer in detect_layers() if layer.name.startswith("Landlock")]
    assert [layer.name for layer in layers if layer.present] == [
        f"Landlock: {name}" for name in rights
    ]
    assert missing_layers(layers) == []


def test_complete_kernel_has_landlock_and_seccomp() -> None:
    layers = run("", "layers")
    assert layers[LANDLOCK][0]
    assert layers[SECCOMP][0]
    verify("require")


@pytest.mark.parametrize(
    ("kernel", "lacking"),
    [
        ("landlock", [LANDLOCK]),
        ("seccomp", [SECCOMP]),
        ("landlock+seccomp", [LANDLOCK, SECCOMP]),
    ],
)
def test_layer_missing_from_kernel_is_detected(kernel: str, lacking: list[str]) -> None:
    layers = run(kernel, "layers")
    assert [name for name in (LANDLOCK, SECCOMP) if not layers[name][0]] == lacking


def test_landlock_advice_depends_on_kernel_version() -> None:
    detail = run("landlock", "layers")[LANDLOCK][1]
    assert os.uname().release in detail
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if version >= (5, 13):
        # The kernel is new enough, so the advice must not ask for a newer one.
        assert "needs 5.13" not in detail
        assert "lsm=" in detail


@pytest.mark.parametrize(
    ("package", "error", "lacking", "advice"),
    [
        ("landlock", "ImportError('no landlock')", "Landlock", f"pip install '{REQUIRED}'"),
        ("pyseccomp", "ImportError('no pyseccomp')", SECCOMP, "libseccomp"),
        (
            "pyseccomp",
            "RuntimeError('Unable to find libseccomp')",
            SECCOMP,
            "apt install libseccomp2",
        ),
    ],
)
def test_missing_package_is_reported_with_advice(
    tmp_path: Path, package: str, error: str, lacking: str, advice: str
) -> None:
    environment = without_package(tmp_path, package, error)
    present, detail = run("", "layers", environment)[lacking]
    assert not present
    assert advice in detail
    refused = run("", "require", environment)["refused"]
    assert f"it lacks {lacking} (" in refused


# Confinement.


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("landlock", f"it lacks {LANDLOCK} ("),
        ("seccomp", f"it lacks {SECCOMP} (not in this kernel)."),
        ("landlock+seccomp", f"; {SECCOMP} (not in this kernel)."),
    ],
)
def test_require_mode_refuses_kernel_without_layer(kernel: str, named: str) -> None:
    refused = run(kernel, "require")["refused"]
    assert refused.startswith("Untrusted code cannot be confined on this machine: it lacks ")
    assert named in refused
    assert "`ndif doctor`" in refused
    assert "NDIF_SANDBOX=best-effort" in refused


@pytest.mark.parametrize(
    ("kernel", "held"),
    [
        ("", BY_FILES | BY_CALLS),
        ("landlock", BY_CALLS),
        ("seccomp", BY_FILES | {"chroot"}),  # dropped capabilities refuse it, too
        ("landlock+seccomp", {"chroot"}),
    ],
)
def test_best_effort_mode_uses_available_layers(kernel: str, held: set[str]) -> None:
    outcomes = run(kernel, "best-effort")
    refused = {name for name, outcome in outcomes.items() if outcome in ("EPERM", "EACCES")}
    if "execute" not in held:
        # The process became another program, and so reported nothing.
        assert outcomes == {"said": "nothing"}
    else:
        assert refused == held


def test_require_mode_confines_on_complete_machine() -> None:
    outcomes = run("", "require")
    assert {name for name, outcome in outcomes.items() if outcome != "ok"} == BY_FILES | BY_CALLS


@pytest.mark.parametrize("kernel", ["", "landlock+seccomp"])
def test_off_mode_confines_nothing(kernel: str) -> None:
    assert run(kernel, "off") == {"said": "nothing"}  # the process became another program


@pytest.mark.parametrize("mode", ["require", "best-effort", "off"])
def test_complete_machine_passes_verification_in_each_mode(mode: Mode) -> None:
    verify(mode)


if __name__ == "__main__":
    main()
