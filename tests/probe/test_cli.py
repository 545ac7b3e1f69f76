"""`ndif probe` against a server with a model for two generations, and against failures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import (
    StartedServer,
)
from tests.commands import NDIF, ndif
from tests.processes import family
from tests.templates.stand_in import LISTENER
from tests.tiny_models import make_gpt2
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.process, pytest.mark.slow]

NAME = "test-org/probed"
_PATIENCE_S = 2 * PATIENCE_S
"""Bound of a command: beyond the five minutes that a probe may take."""


class Operated:
    """A server whose users need keys, and commands on its machine."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.environment = environment
        self.server = StartedServer(*arguments, environment=environment)
        self.server.ready()

    def ndif(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        variables = {**os.environ, "COLUMNS": "300", **self.environment, **variables}
        return ndif(*arguments, environment=variables)

    def deploy(self, folder: Path, generation: str) -> None:
        """Deploy the model of a folder for a generation, and wait until it serves."""
        options = "--dedicated", "--generation", generation
        process = self.ndif("deploy", f"{NAME}={folder}", *options)
        assert process.returncode == 0, process

    def probes(self, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
        """Return the exit code of `ndif probe` and its findings."""
        process = self.ndif("probe", "--json", "--timeout", "5m", *arguments)
        assert process.stdout, process.stderr
        return process.returncode, json.loads(process.stdout)["probes"]


def clients(environment: dict[str, str]) -> list[int]:
    """Return the processes of probes that a server or a command with this environment has started."""
    mark = f"HF_HOME={environment['HF_HOME']}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        is_template = any(variable.startswith(f"{LISTENER}=".encode()) for variable in variables)
        if b"ndif.probe.trace" in command and mark in variables and not is_template:
            pids.append(int(folder.name))
    return pids


def until_no_client(environment: dict[str, str]) -> None:
    """Wait until no process of a probe is left: a fork ends a moment after its stand-in."""
    until(lambda: not clients(environment))


@pytest.fixture(scope="module")
def operated(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operated]:
    """A server that serves one model to clients of 0.8 and of 0.7."""
    root = tmp_path_factory.mktemp("operated")
    model = make_gpt2(root / "model")
    environment = {
        **server_environment,
        "NDIF_SESSION_ROOT": str(root / "sessions"),
        "NDIF_DATABASE_URL": f"sqlite:///{root / 'keys.sqlite'}",
    }
    operated = Operated(environment, f"{NAME}={model}")
    try:
        until(lambda: b'"RUNNING"' in operated.server.get("/status")[1])
        operated.deploy(model, "0.7")
        yield operated
    finally:
        operated.server.stop()


def test_probe_gets_same_value_from_every_generation(operated: Operated) -> None:
    """The operator needs no API key on the server's machine."""
    code, probes = operated.probes()
    assert code == 0, probes
    assert [(probe["model"], probe["generation"]) for probe in probes] == [
        (NAME, "0.8"),
        (NAME, "0.7"),
    ]
    assert {probe["outcome"] for probe in probes} == {"ok"}
    newest, older = probes
    assert newest["value"] == older["value"]
    assert newest["value"]["tokens"]
    assert newest["seconds"] > 0
    until_no_client(operated.environment)


def test_probe_does_not_count_as_user_job(operated: Operated) -> None:
    """The sums of usage contain no job of a probe."""
    operated.probes("--generation", "0.8")
    usage = json.loads(operated.ndif("usage", "--json").stdout)["usage"]
    assert usage == []


def test_remote_server_is_probed_with_api_key(operated: Operated) -> None:
    created = operated.ndif("keys", "create", "--user", "ada@example.org", "--json")
    key = json.loads(created.stdout)["api_key"]
    elsewhere = {"NDIF_SESSION_ROOT": f"{operated.environment['NDIF_SESSION_ROOT']}/none"}
    address = "--url", operated.server.url
    process = operated.ndif(
        "probe", NAME, "--generation", "0.8", *address, "--key", key, **elsewhere
    )
    assert process.returncode == 0, process
    assert f"{NAME} " in process.stdout
    assert " ok " in process.stdout
    refused = operated.ndif("probe", "--generation", "0.8", *address, "--key", "wrong", **elsewhere)
    assert refused.returncode == 1, refused
    assert " error " in refused.stdout


def test_missing_model_and_missing_runtime_are_reported(operated: Operated) -> None:
    process = operated.ndif("probe", "test-org/other")
    assert (process.returncode, process.stdout) == (4, "")
    assert "no model 'test-org/other'" in process.stderr
    process = operated.ndif("probe", "--generation", "0.5")
    assert process.returncode == 1
    assert "nnsight 0.5 is not installed here" in process.stderr
    assert "ndif serves nnsight 0.8, 0.7, 0.6." in process.stderr
    assert "runtime add" not in process.stderr


def hold(server: StartedServer, held: set[int]) -> None:
    """Stop all model processes that are not in `held`: the server replaces a frozen one."""
    with contextlib.suppress(OSError):  # one has just ended
        for process in server.processes():
            for pid in {*family(process)} - held:
                os.kill(pid, signal.SIGSTOP)
                held.add(pid)


def is_confined(process: int) -> bool:
    """Return True if a process has set no_new_privs, as a confined process does."""
    try:
        return "NoNewPrivs:\t1\n" in Path(f"/proc/{process}/status").read_text()
    except OSError:  # it has ended
        return False


def test_hanging_replica_is_timeout_and_leaves_no_process(operated: Operated) -> None:
    held: set[int] = set()
    hold(operated.server, held)
    assert held
    command = [str(NDIF), "probe", "--json", "--generation", "0.8", "--timeout", "40s"]
    environment = {**os.environ, **operated.environment}
    confined = False
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:

        def has_ended() -> bool:
            nonlocal confined
            confined = confined or any(map(is_confined, clients(operated.environment)))
            hold(operated.server, held)
            return process.poll() is not None

        until(has_ended)
        assert process.stdout is not None
        (probe,) = json.loads(process.stdout.read())["probes"]
    for pid in held:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert process.returncode == 1
    assert confined
    assert (probe["outcome"], probe["reason"]) == ("timeout", "No value came within 40s.")
    until_no_client(operated.environment)


def test_probe_reports_other_weights_under_same_name_as_wrong(
    server_environment: dict[str, str], tmp_path: Path
) -> None:
    """One generation loads the model before its files change; the other one loads it afterwards."""
    model = make_gpt2(tmp_path / "model", seed=1)
    environment = {**server_environment, "NDIF_SESSION_ROOT": str(tmp_path / "sessions")}
    operated = Operated(environment, f"{NAME}={model}")
    try:
        until(lambda: b'"RUNNING"' in operated.server.get("/status")[1])
        make_gpt2(model, seed=2)
        operated.deploy(model, "0.7")
        code, (newest, older) = operated.probes()
    finally:
        operated.server.stop()
    assert code == 1
    assert newest["outcome"] == "ok"
    assert older["outcome"] == "wrong"
    assert "differs from the first probe" in older["reason"]
