"""`ndif simulate` from an operator's view."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ndif.cli.main import cli

pytestmark = pytest.mark.process

SMALL = ("--requests", "400", "--models", "40", "--users", "9", "--hours", "1")


def simulate(folder: Path, *arguments: str, hashing: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ndif", "simulate", *arguments],
        cwd=folder,
        # Sets of strings have another order for each number.
        env={**os.environ, "PYTHONHASHSEED": str(hashing), "COLUMNS": "160"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulation")
    process = simulate(folder, "day.jsonl", "--cluster", "c.yaml", "--generate", *SMALL)
    assert process.returncode == 0, process.stderr
    assert "Wrote c.yaml: a cluster with 40 models." in process.stderr
    assert "Wrote day.jsonl: 400 requests in 1 hours." in process.stderr
    # Little memory and short deployment times, so that models evict each other.
    cluster = (folder / "c.yaml").read_text()
    for roomy, tight in (
        ("count: 6", "count: 2"),
        ("8x80GiB", "2x16GiB"),
        ("1TiB", "128GiB"),
        ("15m", "1m"),
    ):
        assert roomy in cluster
        cluster = cluster.replace(roomy, tight)
    (folder / "c.yaml").write_text(cluster)
    return folder


def reported(folder: Path, *arguments: str, hashing: int = 0) -> str:
    process = simulate(
        folder, "day.jsonl", "--cluster", "c.yaml", "--json", *arguments, hashing=hashing
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def first(folder: Path) -> str:
    """The report of the day, with the default seed."""
    return reported(folder)


def test_same_trace_and_seed_give_identical_report(folder: Path, first: str) -> None:
    """Each report comes from a separate process with another hash seed."""
    for hashing in (1, 2):
        assert reported(folder, "--seed", "0", hashing=hashing) == first
    overall = json.loads(first)["overall"]
    # The simulation had events that could have differed.
    assert overall["evicted_to_warm"] > 10
    assert overall["cold_loads"] > 10
    assert overall["warm_returns"] > 0


def test_another_seed_places_differently_and_loses_no_request(folder: Path, first: str) -> None:
    first_report, other = json.loads(first), json.loads(reported(folder, "--seed", "1"))
    assert first_report["nodes"] != other["nodes"]
    assert first_report["overall"]["requests"] == other["overall"]["requests"] == 400
    assert (first_report["trace"]["seed"], other["trace"]["seed"]) == (0, 1)


def test_report_is_printed_as_tables_without_json_option(folder: Path) -> None:
    process = simulate(folder, "day.jsonl", "--cluster", "c.yaml", "--top", "3")
    assert process.returncode == 0, process.stderr
    assert "400 requests of 9 users" in process.stdout
    assert "The first 3 models, of " in process.stdout
    for name in ("lab-0/pythia-000", "a100-1", "p99", "to WARM", "GPUs busy"):
        assert name in process.stdout
    assert "Simulated 1h 2m" in process.stderr


def test_trace_is_generated_for_models_of_existing_cluster_file(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "nodes: [{cpu_memory: 8GiB}]\nmodels: {me/one: 1GB, me/two: 2GB}\n"
    )
    for name in ("a.jsonl", "b.jsonl"):
        process = simulate(
            folder, name, "--cluster", "mine.yaml", "--generate", "--requests", "50", "--seed", "4"
        )
        assert process.returncode == 0, process.stderr
        assert "mine.yaml" not in process.stderr
    lines = (folder / "a.jsonl").read_text().splitlines()
    assert {json.loads(line)["model"] for line in lines} == {"me/one", "me/two"}
    assert lines == (folder / "b.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("none.jsonl", "--cluster", "c.yaml"), "none.jsonl cannot be read"),
        (("day.jsonl", "--cluster", "none.yaml"), "none.yaml cannot be read"),
        (("bad.jsonl", "--cluster", "c.yaml"), "bad.jsonl, line 2: this is not JSON"),
        (
            ("other.jsonl", "--cluster", "c.yaml"),
            "The sizes of these models of the trace are unknown",
        ),
        (("new.jsonl", "--cluster", "empty.yaml", "--generate"), "names no models to request"),
        (("day.jsonl", "--cluster", "c.yaml", "--generate"), "day.jsonl exists already"),
        (("new.jsonl", "--cluster", "no/c.yaml", "--generate"), "no/c.yaml cannot be written"),
    ],
)
def test_invalid_input_is_reported_as_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    line = '{"at": 0, "model": "x/y", "user": "u", "run_s": 1}\n'
    (folder / "bad.jsonl").write_text(f"{line}no\n")
    (folder / "other.jsonl").write_text(line)
    (folder / "empty.yaml").write_text("nodes: [{cpu_memory: 1GiB}]\n")
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert expected in result.stderr
