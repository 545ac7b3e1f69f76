"""Users with keys: their visible jobs, cancellation, and usage."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from tests.clients.harness import Client, StartedServer
from tests.commands import ndif as command
from tests.conftest import NAME, client_environment
from tests.waiting import until

pytestmark = pytest.mark.process

KEYS = {"0.8": "the-key-of-ada", "0.7": "the-key-of-bob"}
SCENARIOS = ("scenario_a_user_ends_their_own_job", "scenario_usage_is_what_clients_were_told")


@pytest.fixture(scope="module")
def server(
    server_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartedServer]:
    """`ndif start` with two users."""
    folder = tmp_path_factory.mktemp("own-jobs")
    keys = folder / "keys.yaml"
    users = zip(KEYS.values(), ("ada", "bob"), strict=True)
    keys.write_text("keys:\n" + "".join(f"- {{key: {key}, user: {user}}}\n" for key, user in users))
    keys.chmod(0o600)
    started = StartedServer(
        NAME,
        environment={
            **server_environment,
            "NDIF_SESSION_ROOT": str(folder / "session"),
            "NDIF_API_KEYS": str(keys),
            "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
        },
    )
    try:
        started.ready()
        until(lambda: started.get(f"/hub/api/models/{NAME}")[0] == 200)
        yield started
    finally:
        started.stop()


@pytest.mark.parametrize("generation", KEYS)
def test_user_of_each_wire_ends_own_jobs_and_reads_usage(
    server: StartedServer, runtimes: Path, tiny_gpt2: Path, tmp_path: Path, generation: str
) -> None:
    overlay = None if generation == "0.8" else runtimes / generation
    other = next(key for key in KEYS.values() if key != KEYS[generation])
    environment = {
        **client_environment(server, tmp_path, overlay),
        "NDIF_API_KEY": KEYS[generation],
        "TEST_OTHER_KEY": other,
    }
    client = Client("scenarios_own_jobs", NAME, tiny_gpt2, environment)
    try:
        for scenario in SCENARIOS:
            client.run(scenario)
    finally:
        client.close()


def ndif(server: StartedServer, *arguments: str) -> str:
    """Return the output of a command on the server's machine."""
    variables = {**server.environment, "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    process = command(*arguments, environment=variables)
    assert process.returncode == 0, process
    return process.stdout


def test_user_sees_own_jobs_and_operator_sees_all_jobs(
    server: StartedServer, tmp_path: Path
) -> None:
    ada = ("--key", KEYS["0.8"])
    jobs = json.loads(ndif(server, "jobs", "list", *ada, "--json"))["jobs"]
    assert {job["status"] for job in jobs} == {"CANCELLED", "COMPLETED"}
    assert not any("user" in job for job in jobs)
    everybody = json.loads(ndif(server, "jobs", "list", "--json"))["jobs"]
    assert {job["user"] for job in everybody} == {"ada", "bob"}
    # The client polled for the second completed job.
    polled = [job for job in jobs if job["status"] == "COMPLETED"][1]
    file = tmp_path / "result.pt"
    ndif(server, "jobs", "result", polled["id"][:12], "-o", str(file), *ada)
    # The stored result is compressed, and the file is not.
    assert file.stat().st_size > polled["result_bytes"]
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded["first"], torch.Tensor), loaded
    by_user = {
        row["user"]: row for row in csv.DictReader(io.StringIO(ndif(server, "usage", "--csv")))
    }
    assert by_user["ada"]["jobs"] == str(len(jobs))
    own = json.loads(ndif(server, "usage", "--by", "day", "--since", "7d", *ada, "--json"))
    assert sum(day["jobs"] for day in own["usage"]) == len(jobs)
    assert sum(day["errors"] for day in own["usage"]) == 0  # two were cancelled


def test_invalid_job_queries_are_rejected(server: StartedServer) -> None:
    ada = {"ndif-api-key": KEYS["0.8"]}
    for path, status, text in (
        ("/requests", 401, "wants an API key"),
        ("/usage", 401, "wants an API key"),
        ("/requests?limit=0", 400, "limit"),
        ("/usage?by=colour", 400, "by"),
        ("/usage?since=yesterday", 400, "since"),
        ("/usage?since=2026-02-31", 400, "There is no day"),
    ):
        headers = {} if status == 401 else ada
        answer = httpx.get(f"{server.url}{path}", headers=headers, verify=False)
        assert (answer.status_code, text in answer.json()["detail"]) == (status, True), answer.text
