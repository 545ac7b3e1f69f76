"""`ndif start` and the operator's commands, with real processes and real models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from nnsight import TransformersModel

from ndif import __version__
from ndif.launch.run_folder import started_at
from tests.commands import NDIF, ndif
from tests.conftest import NAME
from tests.runtime.replica import lasting
from tests.sandbox.confinement.test_layers import without
from tests.serving import without_keys
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.process, pytest.mark.slow]

SECOND = "test-org/second"
MARK = "TEST_MARK"


@dataclass
class Place:
    """A folder of sessions, and a mark that every process started with it inherits."""

    root: Path
    environment: dict[str, str]

    def ndif(
        self,
        *arguments: str | Path,
        kernel: str = "",
        shows_log: bool = False,
        **variables: str,
    ) -> Done:
        """Run a command to its end; only the end of a log may contain a traceback."""
        variables = {**os.environ, **without_keys({**self.environment, **variables})}
        if kernel:
            process = subprocess.run(
                without(kernel, NDIF, *arguments), env=variables, capture_output=True, text=True
            )
        else:
            process = ndif(*arguments, environment=variables)
        assert shows_log or "Traceback" not in process.stderr, process.stderr
        return Done(process.returncode, process.stdout, without_waits(process.stderr))

    def read(self, *arguments: str | Path) -> Any:
        """Return the JSON of a successful command."""
        result = self.ndif(*arguments, "--json")
        assert result.code == 0, result
        return json.loads(result.output)

    def start(self, *arguments: str | Path, **variables: str) -> dict[str, Any]:
        """Start a detached server."""
        result = self.ndif("start", "--detach", "--json", *arguments, **variables)
        assert result.code == 0, result
        info: dict[str, Any] = json.loads(result.output)
        return info

    def processes(self) -> list[str]:
        """Return the command lines of all live processes of this place."""
        mark = f"{MARK}={self.environment[MARK]}".encode()
        commands = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    commands.append((folder / "cmdline").read_text().replace("\0", " "))
        return commands

    def sessions(self) -> list[str]:
        """Return the names of its sessions."""
        return sorted(path.name for path in self.root.glob("session_*"))


@dataclass
class Done:
    """The result of a command."""

    code: int
    output: str
    error: str


def without_waits(errors: str) -> str:
    """Return a command's output without the messages about waiting, which appear on busy machines."""
    return re.sub(r"^Waiting for .* …\n", "", errors, flags=re.MULTILINE)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def a_place(environment: dict[str, str], root: Path) -> Iterator[Place]:
    mark = uuid.uuid4().hex
    place = Place(
        root,
        {
            **environment,
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "NDIF_SESSION_ROOT": str(root),
            "NDIF_API_PORT": free_port(),
            MARK: mark,
        },
    )
    try:
        yield place
    finally:
        if any(root.glob("current")) or any(root.glob("services/*/current")):
            place.ndif("stop", "--services")
        until(lambda: not place.processes(), lambda: str(place.processes()))


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Iterator[Place]:
    yield from a_place(server_environment, tmp_path / "sessions")


@pytest.fixture(scope="module")
def served(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A server with one model, which is ready."""
    root = tmp_path_factory.mktemp("served") / "sessions"
    with contextlib.contextmanager(a_place)(server_environment, root) as place:
        place.start(NAME)
        until(lambda: states(place) == ["RUNNING"], lambda: str(place.ndif("logs")))
        yield place


def models(place: Place) -> dict[str, Any]:
    rows = place.read("status")["models"]
    return {model["repo_id"]: model for model in rows}


def states(place: Place, name: str = NAME) -> list[str]:
    return [replica["state"] for replica in models(place)[name]["replicas"]]


# A server that serves


def test_server_reports_address_and_protects_session_files(served: Place) -> None:
    info = served.read("info")
    port = int(served.environment["NDIF_API_PORT"])
    assert info["url"] == f"http://127.0.0.1:{port}"
    assert info["port"] == port
    assert info["version"] == __version__
    assert info["arguments"] == ["--host", "127.0.0.1", "--port", str(port), NAME]
    assert info["settings"]["NDIF_API_PORT"] == port
    assert httpx.get(f"{info['url']}/ping").json() == "pong"
    folder = Path(info["folder"])
    assert folder.parent == served.root
    assert (served.root / "current").resolve() == folder.resolve()
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "Serving at" in served.ndif("logs", "--lines", "100000").output
    assert served.ndif("info").output.count(info["url"]) == 1


def test_models_named_at_start_are_dedicated(served: Place) -> None:
    assert models(served)[NAME]["dedicated"] is True
    output = served.ndif("status").output
    assert f"{NAME}, dedicated" in output
    assert "IDLE" in output


def test_second_server_is_rejected(served: Place) -> None:
    before = served.sessions()
    for arguments in ([], ["--detach"], ["--port", free_port()]):
        result = served.ndif("start", *arguments)
        assert result.code == 1
        assert re.match(
            r"Error: A server is running already at http://\S+ \(process \d+\)", result.error
        )
    assert served.sessions() == before
    assert states(served) == ["RUNNING"]


def test_model_is_deployed_scaled_exported_and_evicted(served: Place, tiny_gpt2: Path) -> None:
    result = served.ndif("deploy", f"{SECOND}={tiny_gpt2}", "--replicas", "2")
    assert (result.code, result.output) == (0, f"{SECOND} is ready: 2 replicas.\n"), result
    assert states(served, SECOND) == ["RUNNING", "RUNNING"]

    (scaled,) = served.read("scale", SECOND, "1")["models"]
    assert len(scaled["replicas"]) == 1
    exported = yaml.safe_load(served.ndif("export").output)
    assert {entry["repo_id"] for entry in exported} == {NAME, SECOND}

    file = served.root.parent / "models.yaml"
    file.write_text(yaml.safe_dump([entry for entry in exported if entry["repo_id"] == NAME]))
    result = served.ndif("deploy", "--deployment-config", file, "--sync")
    assert result.code == 0, result
    assert "RUNNING" not in states(served, SECOND)
    assert states(served) == ["RUNNING"]


def test_deploy_of_missing_model_fails(served: Place) -> None:
    result = served.ndif("deploy", "test-org/none")
    assert result.code == 1
    assert re.match("Error: .*test-org/none", result.error), result
    assert states(served) == ["RUNNING"]


def test_request_leaves_one_log_line(served: Place) -> None:
    url = served.read("info")["url"]
    job = send(url, NAME, b"no request of any client")
    answer = f"{url}/response/{job}"
    until(lambda: httpx.get(answer).json()["status"] == "ERROR", lambda: httpx.get(answer).text)

    def lines() -> list[str]:
        # With one process, the dispatcher has the same log.
        log_lines = served.ndif("logs", "dispatcher", "-n", "1000").output.splitlines()
        return [line for line in log_lines if f"id={job} " in line]

    until(lambda: bool(lines()))
    (line,) = lines()
    assert f"ndif.requests: request id={job} user=" in line
    assert f"model={NAME} nnsight=0.8 status=ERROR received=20" in line
    assert re.search(r" waited=\d+\.\d{3}s ran=\d+\.\d{3}s$", line)


def test_unique_prefix_selects_replica(served: Place) -> None:
    (replica,) = models(served)[NAME]["replicas"]
    output = served.ndif("status").output
    assert f" {replica['replica_id'][:6]} " in output
    assert replica["replica_id"] not in output
    assert "IDLE" in output
    evicted = served.ndif("evict", NAME, "--replica", replica["replica_id"][:6])
    assert (evicted.code, evicted.output.split()[-3:]) == (
        0,
        [replica["replica_id"][:6], "is", "evicted."],
    )
    assert "NOT DEPLOYED" in served.ndif("status").output
    assert served.ndif("deploy", NAME, "--dedicated").code == 0


def test_missing_target_exits_with_4(served: Place) -> None:
    for arguments in (["evict", "no/model"], ["restart", "no/model"], ["kill", "no-request"]):
        assert served.ndif(*arguments).code == 4


def test_restart_replaces_replica(served: Place) -> None:
    (before,) = models(served)[NAME]["replicas"]
    (restarted,) = served.read("restart", NAME)["restarted"]
    assert restarted["replica_id"] == before["replica_id"]
    until(lambda: states(served) == ["RUNNING"])
    (after,) = models(served)[NAME]["replicas"]
    assert after["replica_id"] != before["replica_id"]


def test_remote_commands_need_address_and_token(served: Place, tmp_path: Path) -> None:
    info = served.read("info")
    elsewhere = {"NDIF_SESSION_ROOT": str(tmp_path)}
    asked = ["queue", "--json", "--url", info["url"], "--token"]
    result = served.ndif(*asked, f"@{info['folder']}/token", **elsewhere)
    assert result.code == 0
    assert json.loads(result.output)["models"][0]["repo_id"] == NAME
    assert served.ndif(*asked, "wrong", **elsewhere).code == 5
    assert served.ndif("queue", **elsewhere).code == 3


def test_info_shows_configuration_of_server_not_of_caller(served: Place) -> None:
    result = served.ndif("info", "--config", "--json", NDIF_RUNNER_POOL="9")
    values = {setting["name"]: setting for setting in json.loads(result.output)["settings"]}
    assert values["NDIF_RUNNER_POOL"]["source"] == "default"
    assert values["NDIF_SESSION_ROOT"]["value"] == str(served.root)


# How it ends


def test_stopped_server_leaves_log(place: Place) -> None:
    info = place.start()
    following = subprocess.Popen(
        [NDIF, "logs", "-f"],
        env={**os.environ, **place.environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    result = place.ndif("stop")
    assert (result.code, result.output) == (0, f"The server at {info['url']} has stopped.\n")
    assert started_at(info["pid"]) is None
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert output.splitlines()[0].endswith(f"Serving at {info['url']}")
    assert output.splitlines()[-1].endswith("Stopped")
    until(lambda: not place.processes(), lambda: str(place.processes()))
    assert not (place.root / "current").is_symlink()
    assert place.ndif("logs", "-n", "1").output.endswith("Stopped\n")
    assert place.ndif("stop").code == 3
    assert not (Path(info["session"]) / "token").exists()


def test_stop_falls_back_to_signal_with_wrong_token(place: Place) -> None:
    info = place.start()
    (Path(info["session"]) / "token").write_text("another")
    assert place.ndif("status").code == 5
    assert json.loads(place.ndif("stop", "--json").output)["how"] == "signal"
    assert started_at(info["pid"]) is None


def test_next_server_takes_over_from_killed_server(place: Place) -> None:
    info = place.start()
    job = send(info["url"], NAME, b"opaque")
    os.kill(info["pid"], signal.SIGKILL)
    until(lambda: started_at(info["pid"]) is None)
    for command in ("status", "stop", "info"):
        assert place.ndif(command).code == 3
    result = place.ndif("start", "--detach")
    assert result.code == 0, result
    name = Path(info["session"]).name
    assert (
        f"The server of {name} ended without shutting down; this one takes its place."
        in result.error
    )
    assert place.read("info")["session_id"] != name
    assert place.ndif("logs").output.count("Serving at") == 1
    assert len(place.ndif("logs", "-n", "1").output.splitlines()) == 1
    # An accepted job still waits for its model.
    poll = f"{info['url']}/response/{job}"
    assert httpx.get(poll).json()["status"] in ("QUEUED", "PROVISIONING", "DEPLOYING")
    assert place.ndif("kill", job).code == 0
    assert httpx.get(poll).json()["status"] == "ERROR"


def send(url: str, model: str, payload: bytes) -> str:
    """Send a job without a live channel and return its id."""
    key = f'nnsight.modeling.transformers.TransformersModel:{{"repo_id": "{model}"}}'

    def sending() -> httpx.Response | None:
        sent = httpx.post(
            f"{url}/request",
            data={"data": json.dumps({"model_key": key, "session_id": ""})},
            files={"blob": payload},
            headers={"nnsight-version": "0.8.1"},
        )
        # A server of many processes answers 503 until one of them leads.
        return None if sent.status_code == httpx.codes.SERVICE_UNAVAILABLE else sent

    sent = until(sending)
    assert sent.status_code == httpx.codes.OK, sent.text
    job: str = sent.json()["id"]
    return job


def test_restart_keeps_models_and_environment(place: Place, tiny_gpt2: Path) -> None:
    info = place.start("api", NDIF_RUNNER_POOL="3")
    assert place.ndif("deploy", f"{SECOND}={tiny_gpt2}", "--dedicated", "--no-wait").code == 0
    # Loading is fast, so a shorter job might end before the server does.
    lasts = lasting(TransformersModel(str(tiny_gpt2), task="text-generation"))
    waiting = send(info["url"], SECOND, lasts)
    result = place.ndif("restart", "--json", NDIF_RUNNER_POOL="5")
    assert result.code == 0, result
    assert "ignores the values here of NDIF_RUNNER_POOL." in result.error
    again = json.loads(result.output)
    poll = f"{again['url']}/response/{waiting}"
    assert httpx.get(poll).json()["status"] not in ("ERROR", "COMPLETED")
    # The restart keeps the argument `api`, which starts no services.
    assert json.loads(Path(again["session"], "config.json").read_text())["arguments"][0] == "api"
    assert again["url"] == info["url"]
    assert again["pid"] != info["pid"]
    assert started_at(info["pid"]) is None
    assert place.read("info")["settings"]["NDIF_RUNNER_POOL"] == 3
    assert models(place)[SECOND]["dedicated"] is True
    until(lambda: states(place, SECOND) == ["RUNNING"], lambda: str(place.ndif("logs")))
    until(
        lambda: httpx.get(poll).json()["status"] == "RUNNING", lambda: str(httpx.get(poll).json())
    )
    assert place.ndif("kill", waiting).code == 0
    until(lambda: httpx.get(poll).json()["status"] == "ERROR")


def test_booked_model_is_downloaded_before_booking_begins(place: Place, tmp_path: Path) -> None:
    begins = datetime.now(timezone.utc) + timedelta(minutes=50)
    calendar, hub = tmp_path / "calendar.ics", tmp_path / "hf"
    calendar.write_text(
        "BEGIN:VCALENDAR\nVERSION:2.0\nPRODID:x\nBEGIN:VEVENT\nUID:1\nDTSTAMP:20260301T000000Z\n"
        f"DTSTART:{begins:%Y%m%dT%H%M%SZ}\nDURATION:PT1H\nSUMMARY:{NAME}\nEND:VEVENT\n"
        "END:VCALENDAR\n"
    )
    place.start("api", NDIF_SCHEDULE=str(calendar), HF_HOME=str(hub))
    until(lambda: len(place.read("events", "--kind", "fetched")["events"]) == 1)
    (event,) = place.read("events", "--kind", "fetched")["events"]
    assert (event["subject"], event["by"]) == (NAME, "calendar")
    assert f"for its booking at {begins:%Y-%m-%d %H:%M} UTC" in event["text"]
    assert [path.is_file() for path in hub.rglob("model.safetensors")] == [True]
    assert place.read("status")["models"] == []
    assert place.ndif("stop").code == 0


def test_server_on_all_interfaces_is_reachable_by_hostname(place: Place) -> None:
    address = "--host", "0.0.0.0", "--insecure"
    result = place.ndif("start", "--detach", *address, NDIF_SANDBOX="best-effort")
    assert "untrusted code runs without full confinement" in result.error
    assert place.ndif("stop").code == 0
    info = place.start(*address)
    assert httpx.URL(info["url"]).host == socket.gethostname()
    assert place.read("queue") == {"models": []}
    assert place.ndif("stop").code == 0


class Foreground:
    """A server in the foreground."""

    def __init__(self, place: Place, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [NDIF, "start", *arguments],
            env={**os.environ, **place.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, text: str) -> str:
        """Read its output up to the line with `text`."""
        assert self.process.stdout is not None
        output = ""
        for line in self.process.stdout:
            output += line
            if text in line:
                return output
        raise AssertionError(output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground_server_prints_instructions_and_stops_on_signal(
    place: Place, number: signal.Signals
) -> None:
    server = Foreground(place)
    output = server.until("Ctrl-C stops it")
    url = f"http://127.0.0.1:{place.environment['NDIF_API_PORT']}"
    assert f"Serving at {url}. In your client:" in output
    assert f"export NDIF_HOST={url}" in output
    assert "ndif deploy" in output
    assert f"Log: {place.root}/{place.sessions()[0]}/logs/api/output.log" in output
    assert place.read("info")["pid"] == server.process.pid
    server.process.send_signal(number)
    assert "Stopped." in server.until("Stopped.")
    assert server.process.wait(PATIENCE_S) == 0
    assert place.ndif("info").code == 3


def test_foreground_server_is_stopped_from_another_terminal(place: Place) -> None:
    server = Foreground(place)
    server.until("Ctrl-C stops it")
    assert place.ndif("stop").code == 0
    assert server.process.wait(PATIENCE_S) == 0


# Problems


def refused(place: Place, *arguments: str | Path, kernel: str = "", **variables: str) -> str:
    """Return the error of a server that must not start, and check that nothing remains."""
    for detach in ([], ["--detach"]):
        result = place.ndif("start", *detach, *arguments, kernel=kernel, **variables)
        assert (result.code, result.output) == (1, ""), result
        assert not place.root.exists()
        assert place.processes() == []
    return result.error


def test_start_reports_all_problems_at_once(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("org/a:\n  replicas: 0\norg/b:\n  runtime: '0.5'\n")
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{key: long-enough, tags: [king]}]")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused(
            place,
            *("--port", port, "--deployment-config", file, "./nothing"),
            NDIF_API_KEYS=str(keys),
            NDIF_DEPLOYMENTS="two words",
            kernel="landlock",
        )
    assert message.startswith("Error: The server cannot start:\n")
    for problem in (
        f"Port {port} is in use.",
        "it lacks Landlock",
        "The API keys cannot be used",
        "line 2: 'org/a': replicas must be at least 1",
        "'two words'",
        "./nothing is a folder",
    ):
        assert problem in message, message


def test_start_reports_single_problem_as_sentence(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    assert refused(place, "--deployment-config", file) == (
        f"Error: {file} cannot be read: No such file or directory.\n"
    )
    file.write_text("org/b:\n  runtime: '0.5'\n")
    message = refused(place, "--deployment-config", file)
    assert "nnsight 0.5, which is not installed. ndif serves nnsight 0.8, 0.7, 0.6." in message
    assert "runtime add" not in message


@pytest.mark.parametrize("root", ["/proc/sessions", "/dev/null/sessions"])
def test_unwritable_session_root_is_rejected(place: Place, root: str) -> None:
    message = refused(place, NDIF_SESSION_ROOT=root)
    assert re.search(rf"{root}.*NDIF_SESSION_ROOT", message), message


def test_invalid_variable_is_named(place: Place) -> None:
    assert "The variable NDIF_RUNNER_POOL is not valid" in refused(place, NDIF_RUNNER_POOL="none")


def test_json_option_needs_detach(place: Place) -> None:
    result = place.ndif("start", "--json")
    assert result.code == 2
    assert "Usage: ndif start" in result.error


FAILS = """
import sys
from ndif.server.embedded import Server
def fails(*arguments, **named):
    raise OSError("the disk is on fire")
Server.__init__ = fails
from ndif.cli.main import cli
cli(["start", *sys.argv[1:]])
"""


@pytest.mark.parametrize("detach", [True, False])
def test_failed_start_is_rolled_back(place: Place, detach: bool) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FAILS, *(["--detach"] if detach else [])],
        env={**os.environ, **without_keys(place.environment)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert "the disk is on fire" in process.stderr
    if detach:
        assert "Error: The server did not come up. The end of its log:" in process.stderr
    else:
        message = without_waits(process.stderr)
        assert message == "Error: The server did not come up: the disk is on fire.\n"
    assert [path.name for path in place.root.iterdir()] == [".lock"]
    assert place.processes() == []
    place.start()
    shutil.rmtree(place.root / place.sessions()[0] / "results")
