"""`ndif local start` from a user's view: refusals, output, and remains after its end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import websocket
import zstandard
from transformers import GPT2LMHeadModel

from ndif.net import StartError, listen
from ndif.schema.model_key import NEWEST_CLASS
from ndif.stores.broker.spool import SPOOL, Spool
from ndif.stores.objects import FileStore
from tests.clients.harness import STARTED_ANEW, Client, LocalServer
from tests.commands import ndif
from tests.conftest import NAME, client_environment
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.process, pytest.mark.slow]

ABSENT = "no-such-org/no-such-model"
ENDS_WITHIN_S = 60
"""Bound of a shutdown, in seconds: it waits for no job or load."""
MARK = "TEST_MARK"


@dataclass
class Place:
    """The surroundings of a server: its temporary files, and a mark that all its processes inherit."""

    mark: str
    tmp: Path
    environment: dict[str, str]

    @property
    def anew(self) -> dict[str, str]:
        """Return the environment of a server that starts all its processes, as a user's does."""
        return self.environment | STARTED_ANEW

    def processes(self) -> list[str]:
        """Return the command lines of its remaining processes, in any session."""
        return [line.decode().replace("\0", " ") for line in self._files("cmdline")]

    def until_gone(self) -> None:
        """Wait until no process is left."""
        until(lambda: not self.processes(), lambda: str(self.processes()))

    def until_it_loads(self) -> None:
        """Wait until one of its processes imports torch, which takes about a second."""
        until(lambda: any(b"libtorch" in maps for maps in self._files("maps")))

    def _files(self, name: str) -> Iterator[bytes]:
        """Yield a file of /proc of each of its processes."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    yield (folder / name).read_bytes()

    def temporary(self) -> list[str]:
        """Return the temporary files, without torch's caches."""
        return sorted(path.name for path in self.tmp.iterdir() if "torch" not in path.name)


@pytest.fixture
def place(server_environment: dict[str, str], tmp_path: Path) -> Place:
    return a_place(server_environment, tmp_path)


def a_place(environment: dict[str, str], folder: Path) -> Place:
    mark, tmp = uuid.uuid4().hex, folder / "tmp"
    tmp.mkdir()
    return Place(mark, tmp, {**environment, MARK: mark, "TMPDIR": str(tmp)})


@pytest.fixture(scope="session")
def half(tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder of bfloat16 weights."""
    folder = tmp_path_factory.mktemp("models") / "half"
    shutil.copytree(tiny_gpt2, folder)
    GPT2LMHeadModel.from_pretrained(tiny_gpt2, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def has_printed(server: LocalServer, text: str) -> bool:
    return any(text in line for line in [*server.output])


def start(place: Place, *arguments: str | Path, **variables: str) -> tuple[int, str]:
    """Start a server that must fail to start; return its exit code and its output."""
    plain = {"COLUMNS": "200", "NO_COLOR": "1"}
    environment = {**os.environ, **plain, **place.environment, **variables}
    process = ndif("local", "start", *arguments, environment=environment)
    place.until_gone()
    assert place.temporary() == []
    output = process.stdout + process.stderr
    assert "Traceback" not in output, output
    return process.returncode, output.strip()


# Errors before loading. If the output does not report the absent model as missing, nothing was loaded.


def test_requested_port_in_use_is_reported(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start(place, ABSENT, "--port", str(port)) == (
            1,
            f"Error: Port {port} is in use. Choose another port with --port, or omit --port to use the "
            "first free one.",
        )


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("no-such-host.invalid", "[Nn]ame|[Rr]esolution"),
        ("192.0.2.1", "Cannot assign requested address"),
        ("garbage garbage", "[Nn]ame|[Rr]esolution"),
    ],
)
def test_unusable_listen_address_is_reported(place: Place, host: str, why: str) -> None:
    code, output = start(place, ABSENT, "--host", host)
    assert code == 1
    assert re.fullmatch(rf"Error: Cannot listen on {host}:8289: .*({why}).*\.", output), output


def test_folder_without_name_is_refused(place: Place, tiny_gpt2: Path) -> None:
    assert start(place, tiny_gpt2) == (
        1,
        f"Error: {tiny_gpt2} is a folder, and clients ask for a model by name: add --name ORG/NAME.",
    )


@pytest.mark.parametrize("missing", ["./missing", "/missing", "../missing/", "~/missing"])
def test_missing_folder_is_reported(place: Place, missing: str) -> None:
    code, output = start(place, missing, "--name", "a/b")
    assert code == 1
    assert re.fullmatch(r"Error: There is no folder \S*missing\.", output), output


def test_folder_without_config_is_refused(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    expected = f"Error: {folder} holds no config.json: it is not a checkpoint's folder."
    for name in ([], ["--name", "a/b"]):
        assert start(place, folder, *name) == (1, expected)


def test_name_option_for_repository_is_refused(place: Place) -> None:
    code, output = start(place, ABSENT, "--name", "a/b")
    assert code == 1
    assert output == "Error: --name is for a folder; clients ask for a repository by its own id."


@pytest.mark.parametrize("folder", ["/proc/results", "/dev/null/results", "/dev/null"])
def test_unusable_results_folder_is_refused(place: Place, folder: str) -> None:
    code, output = start(place, ABSENT, "--results-dir", folder)
    assert code in (1, 2)
    assert re.search(rf"Error: .*{folder}.*\.$", output), output


def test_folder_of_another_server_is_refused_and_kept(place: Place, tiny_gpt2: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = str(occupied.getsockname()[1])
    folder = Path(place.environment["NDIF_SESSION_ROOT"], "local", port)
    held = Spool(folder / SPOOL, FileStore(folder, 60))
    code, output = start(place, tiny_gpt2, "--name", "a/b", "--port", port)
    assert code == 1
    assert "another server has the jobs" in output
    assert (folder / SPOOL).is_dir()
    asyncio.run(held.close())


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NDIF_MAX_REQUEST_BYTES", "much"),
        ("NDIF_MAX_RESULT_BYTES", "-1"),
        ("NDIF_RESULT_TTL_S", "0"),
        ("COORDINATOR_PROCESSOR_REPLY_FREQ_S", "often"),
    ],
)
def test_invalid_variable_is_named(place: Place, variable: str, value: str) -> None:
    code, output = start(place, ABSENT, **{variable: value})
    assert code == 1
    assert re.fullmatch(rf"Error: The variable {variable} is not valid: .*\.", output), output


@pytest.mark.parametrize(
    "arguments",
    [[], ["a/b", "c/d"], ["a/b", "--port", "0"], ["a/b", "--threads", "none"], ["--no"]],
)
def test_invalid_command_shows_usage(place: Place, arguments: list[str]) -> None:
    code, output = start(place, *arguments)
    assert code == 2
    assert output.startswith("Usage: ndif local start [OPTIONS] CHECKPOINT")


# Errors during loading


def test_missing_hub_repository_is_reported(place: Place) -> None:
    code, output = start(place, ABSENT)
    assert code == 1
    assert f"Error: '{ABSENT}' could not be loaded for nnsight 0.8: " in output
    assert re.search("not a valid model identifier|no repository|serves", output), output


@pytest.mark.parametrize("damage", ["garbage", "truncated", "missing"])
def test_damaged_checkpoint_is_reported(
    place: Place, tiny_gpt2: Path, tmp_path: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(tiny_gpt2, tmp_path / "damaged"))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage != "missing":
        weights.write_bytes(b"garbage" * 100 if damage == "garbage" else content[:-1000])
    code, output = start(place, folder, "--name", "a/b")
    assert code == 1
    assert "Error: 'a/b' could not be loaded for nnsight 0.8: " in output
    reason = "model.safetensors" if damage == "missing" else "(?i)safetensor"
    assert re.search(reason, output), output
    assert "Serving at" not in output


def test_missing_gpu_is_reported(place: Place, tiny_gpt2: Path) -> None:
    named = (tiny_gpt2, "--name", "a/b", "--device", "cuda:99")
    code, output = start(place, *named)
    assert code == 1
    assert (
        "The model is to be on cuda:99, but torch" in output or "invalid device ordinal" in output
    ), output


# The port


def test_listen_skips_ports_in_use() -> None:
    with contextlib.ExitStack() as held:
        first = held.enter_context(listen("127.0.0.1", None))
        second = held.enter_context(listen("127.0.0.1", None))
        ports = [listener.getsockname()[1] for listener in (first, second)]
        assert 8289 <= ports[0] < ports[1] < 8289 + 100
        with pytest.raises(StartError, match=f"Port {ports[0]} is in use"):
            listen("127.0.0.1", ports[0])


# Shutdown


@dataclass(frozen=True)
class Ended:
    """An idle server that was interrupted, and its state before."""

    code: int
    output: str
    url: str
    processes: list[str]
    temporary: list[str]
    stored: list[str]
    kept: Path
    """The results folder."""
    place: Place


@pytest.fixture(scope="module")
def ended(
    half: Path, server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Ended:
    """A server of a bfloat16 folder as float32, started while port 8289 was taken, and ended by Ctrl-C."""
    place = a_place(server_environment, tmp_path_factory.mktemp("ended"))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another process has the port
            stack.enter_context(socket.create_server(("127.0.0.1", 8289)))
        server = LocalServer(
            str(half),
            "--name",
            "test-org/half",
            "--dtype",
            "float32",
            environment=place.anew,
        )
        try:
            server.ready()
            root = Path(place.environment["NDIF_SESSION_ROOT"])
            kept = root / "local" / str(httpx.URL(server.url).port)
            others = {*kept.glob("*/*.json")}  # files of an earlier server at the same address
            key = f'{NEWEST_CLASS}:{{"repo_id": "test-org/half", "revision": null}}'
            polled = httpx.post(
                f"{server.url}/request",
                files={
                    "data": (None, json.dumps({"model_key": key})),
                    "blob": ("request", b"garbage"),
                },
            )
            assert polled.status_code == 200, polled.text
            processes, temporary = place.processes(), place.temporary()
            stored = [path.name for path in kept.glob("*/*.json") if path not in others]
        finally:
            code = server.stop()
    output = "\n".join(server.output)
    return Ended(code, output, server.url, processes, temporary, stored, kept, place)


def test_server_skips_default_port_in_use(ended: Ended) -> None:
    port = httpx.URL(ended.url).port
    assert port is not None
    assert port > 8289


def test_model_is_loaded_in_requested_dtype(ended: Ended) -> None:
    assert re.search(r"Loaded test-org/half: .* parameters, float32 on cpu,", ended.output)


def test_output_shows_client_settings(ended: Ended) -> None:
    assert f"export NDIF_HOST={ended.url}\n" in ended.output
    assert f"export HF_ENDPOINT={ended.url}/hub " in ended.output
    assert 'TransformersModel("test-org/half")' in ended.output
    assert "Warning" not in ended.output


def test_ctrl_c_ends_server_and_all_its_processes(ended: Ended) -> None:
    assert ended.code == 0
    assert len(ended.processes) >= 3, "the server, its model process and a runner"
    assert ended.place.processes() == []
    assert ended.output.endswith("Stopped.")
    assert "Traceback" not in ended.output


def test_end_of_polled_job_is_kept(ended: Ended) -> None:
    assert ended.temporary == []
    assert len({*ended.stored}) == 1, "of one job: its last update and, if it came by then, its end"
    assert {path.name for path in ended.kept.glob("*/*.json")} >= {*ended.stored}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_server_ends_on_signal_while_it_loads(place: Place, number: signal.Signals) -> None:
    server = LocalServer(NAME, environment=place.anew)
    try:
        place.until_it_loads()
        began = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - began < ENDS_WITHIN_S
    finally:
        server.process.kill()
    place.until_gone()
    assert place.temporary() == []
    assert not server.url
    assert has_printed(server, "Stopped.")
    assert not has_printed(server, "Traceback")


@pytest.fixture(scope="module")
def recorded(
    server: LocalServer, tiny_gpt2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Recorded payloads of a client, for any server of the same model."""
    folder, home = tmp_path_factory.mktemp("recorded"), tmp_path_factory.mktemp("client")
    environment = {**client_environment(server, home, None), "RECORDED": str(folder)}
    client = Client("scenarios_limits", NAME, tiny_gpt2, environment)
    try:
        client.run("scenario_payloads_are_recorded")
    finally:
        client.close()
    return folder


def submit(server: LocalServer, payload: Path, session: str = "") -> str:
    """Send a recorded payload; return the job's id."""
    key = f'{NEWEST_CLASS}:{{"repo_id": "{NAME}", "revision": null}}'
    envelope = {"model_key": key, "compress": True, "session_id": session}
    answer = httpx.post(
        f"{server.url}/request",
        files={"data": (None, json.dumps(envelope)), "blob": ("request", payload.read_bytes())},
    )
    assert answer.status_code == 200, answer.text
    job: str = answer.json()["id"]
    return job


def polled(server: LocalServer, job: str) -> dict[str, str]:
    """Return the last response of a job."""
    response: dict[str, str] = httpx.get(f"{server.url}/response/{job}").json()
    return response


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@contextlib.contextmanager
def running_job(server: LocalServer, payload: Path) -> Iterator[websocket.WebSocket]:
    """Yield the live channel of a running job that does not end by itself."""
    channel = websocket.create_connection(f"ws{server.url[4:]}/subscribe", timeout=PATIENCE_S)
    try:
        submit(server, payload, json.loads(channel.recv())["session_id"])
        while json.loads(channel.recv())["status"] != "LOG":
            pass
        yield channel
    finally:
        channel.close()


def test_server_ends_while_job_runs_and_keeps_results(
    place: Place, recorded: Path, tmp_path: Path
) -> None:
    results = tmp_path / "kept" / "results of mine"
    server = LocalServer(NAME, "--results-dir", str(results), environment=place.anew)
    try:
        server.ready()
        job = submit(server, recorded / "ends")
        poll = f"{server.url}/response/{job}"
        until(lambda: httpx.get(poll).json()["status"] == "COMPLETED")
        with running_job(server, recorded / "never ends") as channel:
            began = time.monotonic()
            code = server.stop(signal.SIGTERM)
            took = time.monotonic() - began
            # The waiting client gets an error with the reason.
            last = json.loads(channel.recv())
            while last["status"] == "RUNNING":
                last = json.loads(channel.recv())
            assert last["status"] == "ERROR"
            assert last["description"].startswith(
                "The server was stopped before this job was done."
            )
    finally:
        server.process.kill()
    assert code == 0
    assert took < ENDS_WITHIN_S
    assert place.processes() == []
    assert not has_printed(server, "Traceback")
    assert place.temporary() == []
    (kept,) = results.glob("results/*.pt")
    content = zstandard.ZstdDecompressor().decompress(kept.read_bytes())
    values = torch.load(io.BytesIO(content), weights_only=False)
    assert torch.equal(values["large"], torch.arange(100_000.0))
    # Partially written files are not kept.
    folders = {"results", "responses", "ends", "spool", "callbacks"}
    assert {path.name for path in results.iterdir()} == {*folders, ".signing"}


@pytest.mark.parametrize("moment", ["idle", "running", "loading"])
def test_killed_server_leaves_no_process_behind(
    place: Place, half: Path, recorded: Path, moment: str
) -> None:
    again = [NAME, "--port", free_port()]
    server = LocalServer(
        *([str(half), "--name", "test-org/half"] if moment == "idle" else again),
        environment=place.anew,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(server.process.kill)
        if moment == "loading":
            place.until_it_loads()
        else:
            server.ready()
            assert len(place.processes()) >= 3
        if moment == "running":
            began = submit(server, recorded / "never ends")
            until(lambda: polled(server, began)["status"] == "RUNNING")
            waits = submit(server, recorded / "ends")
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        place.until_gone()
    if moment == "idle":
        # Without a requested dtype, the checkpoint's dtype is used.
        assert has_printed(server, "bfloat16 on cpu")
    if moment == "running":
        # A polling client finds both jobs again, and both end.
        server = LocalServer(*again, environment={**place.anew, "NDIF_MAX_ATTEMPTS": "1"})
        try:
            server.ready()
            until(lambda: polled(server, waits)["status"] == "COMPLETED")
            assert httpx.get(polled(server, waits)["data"]).status_code == 200
            assert polled(server, began)["status"] == "ERROR"
            assert "ended once while it ran this job" in polled(server, began)["description"]
            left = submit(server, recorded / "never ends")
            until(lambda: polled(server, left)["status"] == "RUNNING")
        finally:
            server.stop()
        assert has_printed(server, "1 polled job waits, to run once port"), [*server.output][-8:]
        # An orderly shutdown does not count as an attempt of the running job.
        (spool,) = Path(place.environment["NDIF_SESSION_ROOT"]).glob(
            f"local/{again[-1]}/spool/*.sqlite"
        )
        with contextlib.closing(sqlite3.connect(spool)) as connection:
            assert connection.execute("SELECT id, attempts FROM job").fetchall() == [(left, 0)]


def test_no_token_option_warns_that_every_user_may_run_code(place: Place) -> None:
    code, output = start(place, ABSENT, "--no-token")
    assert code == 1
    assert (
        "Warning: Every user of this machine runs code here as you: --no-token asks nobody"
        in output
    )


def test_listening_on_all_addresses_causes_warning(place: Place) -> None:
    server = LocalServer(NAME, "--host", "0.0.0.0", environment=place.anew)
    try:
        warning = "Warning: 0.0.0.0 is reachable from other machines. Everybody who has the token runs code"
        until(lambda: has_printed(server, warning))
    finally:
        server.stop()
    place.until_gone()
    assert place.temporary() == []
    assert not has_printed(server, "Traceback")
