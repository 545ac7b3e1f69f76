"""The output of `ndif doctor`, and servers that refuse to start on a machine without confinement."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from ndif import __version__
from ndif.launch.machine_checks import Gpus, check_torch
from tests.commands import NDIF
from tests.host.machines import H100, Machine
from tests.sandbox.confinement.test_layers import LANDLOCK, SECCOMP, without, without_package
from tests.services.process import free_port
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

REFUSAL = r"Untrusted code cannot be confined on this machine: it lacks"


def ndif(
    kernel: str, *arguments: str | Path, environment: dict[str, str] | None = None
) -> tuple[int, str]:
    process = subprocess.run(
        without(kernel, NDIF, *arguments),
        env={
            **os.environ,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "NDIF_API_PORT": str(free_port()),
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "Traceback" not in process.stderr, process.stderr
    # On a busy machine, a command also reports its waits.
    return (
        process.returncode,
        process.stdout if "--json" in arguments else process.stdout + process.stderr,
    )


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"│ {name} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_doctor_reports_all_layers_present() -> None:
    code, output = ndif("", "doctor")
    assert code == 0
    assert row(output, LANDLOCK)[1:3] == ["yes", "yes"]
    assert row(output, SECCOMP)[1:] == ["yes", "yes", "an allow-list"]
    assert "Untrusted code runs confined on this machine." in output
    assert "refused" not in output


def test_doctor_reports_wrong_settings_as_problems(machine: Machine, tmp_path: Path) -> None:
    machine.becomes(H100[:1])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = ndif(
            "",
            "doctor",
            environment={
                "NDIF_API_PORT": port,
                "NDIF_API_KEYS": str(tmp_path / "none"),
                "NDIF_BROKER_URL": "redis://broker.invalid:6379",
                "NDIF_API_WROKERS": "2",
            },
        )
    assert code == 1
    assert row(output, f"port {port}")[1] == "problem"
    assert row(output, "broker")[1] == "problem"
    assert "Nothing answers at redis://broker.invalid:6379" in output
    assert row(output, "API keys")[1] == "problem"
    assert row(output, "GPUs")[1:] == ["ok", "NVIDIA H100 80GB HBM3 (79.2GiB)"]
    assert "NDIF_API_WROKERS is not read" in output


def test_doctor_notes_uncompiled_modules(tmp_path: Path) -> None:
    # As JSON, since a table wraps its lines by the length of this machine's paths.
    note = "torch is not compiled"
    nothing_kept = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code, output = ndif("", "doctor", "--json", environment=nothing_kept)
    assert code == 0
    assert note in output
    assert "-m compileall -q -j 0" in output
    assert note not in ndif("", "doctor", "--json")[1]


@pytest.mark.parametrize(
    ("cuda", "machine_", "state", "says"),
    [
        (None, Gpus(), "ok", "2.13.0, for CPUs only"),
        (None, Gpus(("H100",)), "problem", "for CPUs only: install a build for CUDA"),
        (
            (13, 0),
            Gpus(("H100",), (), "570.1", (12, 8)),
            "problem",
            "driver 570.1 is for CUDA 12.8",
        ),
        ((13, 0), Gpus((), (), "570.1", (12, 8)), "ok", "for CUDA 13.0"),
        ((12, 9), Gpus(("H100",), (), "570.1", (12, 8)), "ok", "for CUDA 12.9"),
        ((12, 8), Gpus(("H100",), (), "590.1", (13, 1)), "ok", "for CUDA 12.8"),
        ((13, 0), Gpus(("H100",)), "ok", "for CUDA 13.0"),
    ],
)
def test_doctor_checks_torch_against_driver(
    cuda: tuple[int, int] | None, machine_: Gpus, state: str, says: str
) -> None:
    check = check_torch("2.13.0", cuda, machine_)
    assert check.state == state
    assert says in check.detail


def test_version_all_prints_every_version() -> None:
    code, output = ndif("", "version", "--all", "--json")
    versions = json.loads(output)["versions"]
    assert code == 0
    assert versions["ndif-server"] == __version__
    assert versions["torch"] == metadata.version("torch")
    assert versions["nnsight (0.8)"] == metadata.version("nnsight")
    assert "ray" in versions
    code, output = ndif("", "version", "--all")
    assert f"torch {versions['torch']}\n" in output


def test_doctor_checks_disk_of_download_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    code, output = ndif("", "doctor", environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert code == 0
    assert row(output, "disk: models")[2].startswith(f"{tmp_path}/huggingface/hub has ")


def test_doctor_prints_json() -> None:
    code, output = ndif("", "doctor", "--json")
    answer = json.loads(output)
    assert code == 0
    assert answer.keys() == {"layers", "safe", "checks"}
    assert answer["safe"] is True
    checks = {check["name"]: check for check in answer["checks"]}
    assert {"Python", "torch", "GPUs", "nnsight 0.8", "disk: sessions", "disk: models"} < {*checks}
    assert not [check for check in checks.values() if check["state"] == "problem"]
    for layer in answer["layers"]:
        assert layer.keys() == {"name", "present", "required", "detail"}
        assert layer["present"] or not layer["required"]


@pytest.mark.parametrize(
    ("kernel", "lacking"),
    [
        ("landlock", [LANDLOCK]),
        ("seccomp", [SECCOMP]),
        ("landlock+seccomp", [LANDLOCK, SECCOMP]),
    ],
)
def test_doctor_reports_missing_layer(kernel: str, lacking: list[str]) -> None:
    code, output = ndif(kernel, "doctor")
    assert code == 1
    for name in lacking:
        assert row(output, name)[1:3] == ["no", "yes"]
    assert "Untrusted code is refused on this machine" in output
    assert "NDIF_SANDBOX=best-effort" in output

    code, output = ndif(kernel, "doctor", "--json")
    assert code == 1
    answer = json.loads(output)
    assert answer["safe"] is False
    assert [
        layer["name"] for layer in answer["layers"] if layer["required"] and not layer["present"]
    ] == lacking


def test_doctor_advises_which_package_to_install(tmp_path: Path) -> None:
    environment = without_package(tmp_path, "pyseccomp", "RuntimeError('no libseccomp')")
    code, output = ndif("", "doctor", environment=environment)
    assert code == 1
    assert "apt install libseccomp2" in row(output, SECCOMP)[3]


def test_help_lists_doctor() -> None:
    code, output = ndif("", "--help")
    assert code == 0
    assert re.search(r"^  doctor +Check that this machine can run a server", output, re.MULTILINE)


# A server for untrusted users.


@pytest.mark.parametrize("kernel", ["landlock", "seccomp"])
def test_sandboxed_server_without_layer_is_refused_before_loading(
    kernel: str, tiny_gpt2: Path, tmp_path: Path
) -> None:
    code, output = ndif(
        kernel, "local", "start", tiny_gpt2, "--name", "a/b", "--sandbox",
        environment={"NDIF_SESSION_ROOT": str(tmp_path)},
    )  # fmt: skip
    assert code == 1
    assert re.search(rf"^Error: {REFUSAL}", output, re.MULTILINE), output
    assert "NDIF_SANDBOX=best-effort" in output
    assert "Loading" not in output
    assert "Loaded" not in output


def test_a_trusting_server_needs_no_layers(tmp_path: Path) -> None:
    code, output = ndif("landlock+seccomp", "local", "start", "./nothing-is-here")
    assert code == 1
    assert "There is no folder" in output


def test_server_without_landlock_starts_with_best_effort_sandbox(
    tiny_gpt2: Path, tmp_path: Path
) -> None:
    server = subprocess.Popen(
        without("landlock", NDIF, "local", "start", tiny_gpt2, "--name", "a/b", "--sandbox"),
        env={
            **os.environ,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "NDIF_SANDBOX": "best-effort",
            "NDIF_SESSION_ROOT": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line)
            if "Serving at" in line:
                break
        assert any("Serving at" in line for line in lines), "".join(lines)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
