"""The systemd units: verification, exposure rating, and the system calls left to the sandbox."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ndif.sandbox.confinement import seccomp
from tests.deploy.profiles import UNITS, YOUNGER, unit_calls
from tests.services.packages import need

pytestmark = pytest.mark.process

NAMES = ("ndif.service", "ndif-worker.service")
MOST_EXPOSED = 25
"""Ten times the exposure level that systemd may find: it calls up to 2 OK, and 0 perfect."""
FORBIDDEN = {"mount", "pivot_root", "bpf", "perf_event_open", "init_module", "reboot"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a machine with systemd's own units, ours with both drop-ins, and the program."""
    need("systemd-analyze", "systemd")
    root = tmp_path_factory.mktemp("machine")
    library = root / "usr" / "lib" / "systemd"
    library.mkdir(parents=True)
    shutil.copytree("/usr/lib/systemd/system", library / "system", symlinks=True)
    (root / "lib").symlink_to("usr/lib")
    ours = root / "etc" / "systemd" / "system"
    shutil.copytree(UNITS, ours)
    shutil.copytree(ours / "ndif.service.d", ours / "ndif-worker.service.d")
    program = root / "opt" / "ndif" / "bin" / "ndif"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_systemd_verifies_unit_without_warning(machine: Path, name: str) -> None:
    verify = ["systemd-analyze", "verify", f"--root={machine}", name]
    process = subprocess.run(verify, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.parametrize("name", NAMES)
def test_systemd_rates_unit_exposure_low(machine: Path, name: str) -> None:
    rate = ["systemd-analyze", "--no-pager", "security", "--offline=true", f"--root={machine}"]
    process = subprocess.run(
        [*rate, f"--threshold={MOST_EXPOSED}", name], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("name", NAMES)
def test_unit_allows_sandbox_calls_and_forbids_namespaces(name: str) -> None:
    allowed = unit_calls(name)
    assert {*seccomp._ALLOWED, *seccomp._FORKING.split()} - allowed <= YOUNGER
    assert allowed & FORBIDDEN == set()
    assert "\nRestrictNamespaces=yes\n" in (UNITS / name).read_text()


def test_both_units_have_same_hardening() -> None:
    def hardening(name: str) -> list[str]:
        lines = (UNITS / name).read_text().partition("NoNewPrivileges")[2].splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    assert hardening(NAMES[0]) == hardening(NAMES[1])
