"""Every command against a remote server: text output, JSON output and exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click.testing
import pytest
import yaml
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ndif.cli.deploy import SETTINGS
from ndif.cli.main import cli
from ndif.launch.run_folder import RunFolders, RunRecord
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.deployment_settings import SETTING_NAMES
from tests.cli.operations import TOKEN, Table, application
from tests.schema.configs import read
from tests.serving import serving

Result = click.testing.Result
Ndif = Callable[..., Result]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def url(table: Table) -> Iterator[str]:
    with serving(application(table)) as address:
        yield address


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no server runs."""
    monkeypatch.setenv("NDIF_SESSION_ROOT", str(tmp_path / "sessions"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def ndif(here: Path, url: str) -> Ndif:
    """A command with the server's address and token."""

    def run(*arguments: str | Path, token: str = TOKEN) -> Result:
        return invoke(*arguments, "--url", url, "--token", token)

    return run


def invoke(*arguments: str | Path) -> Result:
    result = click.testing.CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(result: Result) -> Any:
    """Return the JSON of a successful command."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    return result.stderr


# deploy


def test_deploy_reports_ready_models(ndif: Ndif, table: Table) -> None:
    result = ndif("deploy", "org/a", "org/b", "--replicas", "1", "--dedicated")
    assert result.exit_code == 0
    assert result.stdout == "org/a is ready: 1 replica.\norg/b is ready: 1 replica.\n"
    assert table.waited_for == [True]
    assert all(deployment.config.dedicated for deployment in table.deployed.values())


def test_deploy_keeps_omitted_settings_and_lists_changes(ndif: Ndif, table: Table) -> None:
    ndif("deploy", "org/a", "--replicas", "2", "--dedicated")
    again = ndif("deploy", "org/a")
    assert again.stdout == "org/a is ready: 2 replicas.\n"
    assert table.deployed["org/a"].config.dedicated
    changed = ndif("deploy", "org/a", "--replicas", "1", "--no-dedicated")
    assert changed.stdout == (
        "org/a: replicas 2 → 1, dedicated true → false.\norg/a is ready: 1 replica.\n"
    )
    assert not table.deployed["org/a"].config.dedicated


def test_every_deployment_setting_has_an_option(ndif: Ndif, table: Table) -> None:
    options = {name.partition("/")[0].removeprefix("--").replace("-", "_") for name, _ in SETTINGS}
    # The checkpoint is an argument, and `--generation` selects the generation.
    assert options == SETTING_NAMES.keys() - {"checkpoint", "runtime", "generations"}
    result = ndif(
        *("deploy", "org/a", "--dtype", "float32", "--device", "cpu", "--revision", "v2"),
        *("--execution-timeout-seconds", "15m", "--padding-bytes", "1GiB", "--trust-remote-code"),
        *("--size-bytes", "140GB", "--pinned"),
    )
    assert result.exit_code == 0
    (deployed,) = table.deployed.values()
    assert deployed.config == DeploymentConfig(
        "org/a",
        "org/a",
        revision="v2",
        dtype="float32",
        device="cpu",
        execution_timeout_s=900.0,
        dedicated=True,
        size_bytes=140 * 10**9,
        padding_bytes=1 << 30,
        trust_remote_code=True,
    )
    assert "threads must be" in error(ndif("deploy", "org/a", "--threads", "-1"), 5)


def test_default_value_in_file_counts_as_given(ndif: Ndif, table: Table, here: Path) -> None:
    ndif("deploy", "org/a", "--replicas", "2")
    file = here / "models.yaml"
    file.write_text("org/a: {replicas: 1}")
    assert "replicas 2 → 1" in ndif("deploy", "--deployment-config", file).stdout


@pytest.mark.parametrize(
    ("arguments", "down_s", "sentence"),
    [
        ([], 12.34, "the model was unavailable while it loaded (12.3s)."),
        (["--no-wait"], 10.0, "the model is unavailable while it loads (10s)."),
        (["--no-wait"], None, "the model is unavailable while it loads."),
    ],
)
def test_deploy_reports_downtime_for_lack_of_memory(
    ndif: Ndif, table: Table, arguments: list[str], down_s: float | None, sentence: str
) -> None:
    table.down_s = down_s
    output = ndif("deploy", "org/down", *arguments).stdout
    verb = "is" if arguments else "was"
    assert f"There {verb} no memory for old and new replicas of org/down" in output
    assert sentence in output


def test_no_wait_option_returns_before_model_is_loaded(ndif: Ndif, table: Table) -> None:
    result = ndif("deploy", "org/a", "--no-wait", "--generation", "0.7")
    assert result.stdout == "org/a is loading: 1 replica.\n"
    assert table.waited_for == [False]
    assert table.deployed["org/a"].generation == "0.7"


def test_deployment_file_reaches_server_complete(ndif: Ndif, table: Table, here: Path) -> None:
    text = """
        - repo_id: org/a
          checkpoint: /models/a
          padding_bytes: 1GiB
          execution_timeout_seconds: 15m
          runtime: "0.7"
        - org/b
    """
    file = here / "models.yaml"
    file.write_text(text)
    answer = printed(ndif("deploy", "--deployment-config", file, "--json"))
    assert [entry["repo_id"] for entry in answer["models"]] == ["org/a", "org/b"]
    assert tuple(deployment.config for deployment in table.deployed.values()) == read(text, "")


def test_checkpoint_argument_needs_absolute_path(ndif: Ndif, table: Table) -> None:
    assert ndif("deploy", "org/a=/models/a").exit_code == 0
    assert table.deployed["org/a"].config.checkpoint == "/models/a"
    assert "whole path" in error(ndif("deploy", "org/a=models/a"), 1)


def test_sync_evicts_models_missing_from_file(ndif: Ndif, table: Table, here: Path) -> None:
    ndif("deploy", "org/a", "org/b")
    file = here / "models.json"
    file.write_text('["org/b"]')
    result = ndif("deploy", "--deployment-config", file, "--sync")
    assert result.stdout == "Evicted: org/a (replica r1).\norg/b is ready: 1 replica.\n"
    assert [*table.deployed] == ["org/b"]


def test_deploy_exits_with_1_if_model_does_not_fit(ndif: Ndif) -> None:
    result = ndif("deploy", "org/a", "--replicas", "5")
    assert result.exit_code == 1
    assert result.stdout == "org/a is ready: 3 replicas.\n"
    assert result.stderr == "Error: org/a: There is room for 3 of 5 replicas.\n"
    result = ndif("deploy", "org/a", "--replicas", "5", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["models"][0]["problem"] == "There is room for 3 of 5 replicas."


@pytest.mark.parametrize(
    "arguments",
    [
        ["deploy"],
        ["deploy", "a/b", "--deployment-config", "x"],
        ["deploy", "a/b", "--replicas", "0"],
    ],
    ids=" ".join,
)
def test_invalid_deploy_arguments_show_usage(ndif: Ndif, arguments: list[str]) -> None:
    assert "Usage: cli deploy" in error(ndif(*arguments), 2)


def test_errors_of_deployment_file_name_their_lines(ndif: Ndif, here: Path) -> None:
    file = here / "models.yaml"
    file.write_text("org/a:\n  replicas: 0\norg/b:\n  dedicate: true\n")
    message = error(ndif("deploy", "--deployment-config", file), 1)
    assert "line 2: 'org/a': replicas must be at least 1" in message
    assert "line 4: 'org/b': 'dedicate' is not a setting" in message
    assert "cannot be read" in error(ndif("deploy", "--deployment-config", here / "none"), 1)


def test_rejection_by_server_exits_with_5(ndif: Ndif) -> None:
    message = error(ndif("deploy", "org/a", "--generation", "9.9"), 5)
    assert message == "Error: nnsight 9.9 is not installed here: run `ndif runtime add 9.9`.\n"
    assert "--token" in error(ndif("deploy", "org/a", token="wrong"), 5)


# The others


def test_model_is_scaled_and_evicted(ndif: Ndif, table: Table) -> None:
    ndif("deploy", "org/a")
    assert ndif("scale", "org/a", "2").stdout == "org/a is to have: 2 replicas.\n"
    assert printed(ndif("scale", "org/a", "1", "--json"))["models"][0]["replicas"] == ["r1"]
    ndif("scale", "org/a", "2")
    assert ndif("evict", "org/a", "--replica", "r1", "--cold").stdout.endswith("r1 is evicted.\n")
    (left,) = table.deployed["org/a"].replicas
    assert printed(ndif("evict", "org/a", "--json"))["evicted"][0]["replica_id"] == left
    assert table.deployed["org/a"].level == "WARM"


def test_evict_all_evicts_every_model(ndif: Ndif, table: Table) -> None:
    ndif("deploy", "org/a", "org/b")
    output = ndif("evict", "--all").stdout
    assert output.count("is evicted.") == 2
    assert output.endswith("org/booked is not evicted: the calendar has it dedicated now.\n")
    assert not table.deployed
    assert "There was nothing to evict." in ndif("evict", "--all").stdout
    for arguments in ((), ("org/a", "--all"), ("--all", "--replica", "r1")):
        assert "Give either MODEL" in error(ndif("evict", *arguments), 2)


def test_restart_restarts_replicas_of_model(ndif: Ndif) -> None:
    ndif("deploy", "org/a")
    assert ndif("restart", "org/a").stdout.endswith("replica r1 restarts.\n")
    assert ndif("restart", "org/a", "--generation", "0.8").exit_code == 0
    assert "no replica for nnsight 0.7" in error(ndif("restart", "org/a", "--generation", "0.7"), 4)
    for subjects in ([], ["broker"]):
        assert "--generation needs a MODEL" in error(
            ndif("restart", *subjects, "--generation", "0.8"), 2
        )
    assert printed(ndif("restart", "org/a", "--json"))["restarted"][0]["replica_id"] == "r1"


def test_restart_keeps_server_whose_models_cannot_be_exported(
    ndif: Ndif, table: Table, here: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = RunFolders(here / "sessions").create()
    host, port = url.removeprefix("http://").split(":")
    record = RunRecord.of_this_process(
        session.id, url=url, host=host, port=int(port), version="1", arguments=[], settings={}
    )
    session.publish(record)
    monkeypatch.setattr("ndif.cli.stop.end", lambda server: pytest.fail("it was ended"))
    try:
        ndif("deploy", "org/a")
        ndif("scale", "org/a", "0")  # the export of 0 replicas is not a valid deployment file
        assert "The server is not restarted" in error(ndif("restart"), 1)
    finally:
        session.end()


def test_remote_server_cannot_be_restarted(ndif: Ndif, table: Table) -> None:
    assert "on its own machine" in error(ndif("restart"), 5)
    assert not table.stopped


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict", "org/none"],
        ["scale", "org/none", "1"],
        ["restart", "org/none"],
        ["kill", "request-9"],
        ["callbacks", "retry", "request-9"],
    ],
    ids=" ".join,
)
def test_missing_target_exits_with_4(ndif: Ndif, arguments: list[str]) -> None:
    message = error(ndif(*arguments), 4)
    assert arguments[-1 if arguments[0] == "callbacks" else 1] in message
    assert message.endswith(".\n")


def test_kill_ends_request(ndif: Ndif, table: Table) -> None:
    assert ndif("kill", "request-1").stdout == "Request request-1 is ended.\n"
    assert table.running == []
    assert printed(ndif("kill", "request-2", "--json")) == {
        "killed": True,
        "request_id": "request-2",
    }


def test_callbacks_are_listed_and_retried(ndif: Ndif, table: Table) -> None:
    output = ndif("callbacks", "list").stdout
    for text in ("0 waiting, 2 given up", "request-4", "https://example.org/…", "it answered 500"):
        assert text in output
    assert len(printed(ndif("callbacks", "list", "--json"))["callbacks"]) == 2
    output = ndif("callbacks", "retry", "request-4").stdout
    assert output == "The webhook or mail of request-4 is retried.\n"
    assert "1 waiting, 1 given up" in ndif("callbacks", "list").stdout
    assert printed(ndif("callbacks", "retry", "--all", "--json")) == {"retried": ["request-5"]}
    assert ndif("callbacks", "retry", "--all").stdout == "0 webhooks and mails are retried.\n"
    table.called_again.clear()
    assert ndif("callbacks", "list").stdout == "No webhook or mail waits, and none was given up.\n"


def test_alerts_are_listed_and_tested(ndif: Ndif, table: Table) -> None:
    output = ndif("alerts", "list").stdout
    for text in ("store-away", "The broker does not answer", "Resolved: none.", "hooks.slack.com"):
        assert text in output, text
    assert len(printed(ndif("alerts", "list", "--json"))["open"]) == 1
    table.incidents = []
    assert "Open: none." in ndif("alerts", "list").stdout
    assert ndif("alerts", "test").stdout == "https://example.org/… (json): delivered\n"
    table.tested[0]["problem"] = "it answered 404"
    result = ndif("alerts", "test")
    assert (result.exit_code, result.stdout) == (
        1,
        "https://example.org/… (json): it answered 404\n",
    )


def test_events_name_operation_and_caller(ndif: Ndif) -> None:
    assert printed(ndif("events", "--json")) == {"events": []}
    assert ndif("deploy", "org/a", "--no-wait").exit_code == 0
    assert ndif("scale", "org/a", "2").exit_code == 0
    assert ndif("evict", "org/none").exit_code == 4
    events = printed(ndif("events", "--json"))["events"]
    assert [(event["kind"], event["subject"], event["by"]) for event in events] == [
        ("scaled", "org/a", "command line"),
        ("deployed", "org/a", "command line"),
    ]
    assert len(printed(ndif("events", "--limit", "1", "--json"))["events"]) == 1
    output = ndif("events", "--kind", "deployed").stdout
    assert "1 replica for nnsight 0.8." in output
    assert "scaled" not in output


@pytest.mark.parametrize("arguments", [[], ["request-4", "--all"]], ids=" ".join)
def test_callbacks_retry_takes_either_id_or_all(ndif: Ndif, arguments: list[str]) -> None:
    assert "either REQUEST_ID or --all" in error(ndif("callbacks", "retry", *arguments), 2)


def test_status_shows_nodes_models_replicas_and_problems(ndif: Ndif, table: Table) -> None:
    assert "No model is deployed." in ndif("status").stdout
    ndif("deploy", "org/a", "org/slow", "--dedicated", "--no-wait")
    output = ndif("status").stdout
    for text in (
        *("this-machine", "GPU 0", "24GiB", "10GiB"),
        *("org/a, dedicated", "0.8", "500MB", "READY", "IDLE", "GPU 0 of this-machine"),
        *("DEPLOYING 25 %", "[one] of the disks is slow."),
    ):
        assert text in output, text
    (heading,) = (line for line in output.splitlines() if "nnsight" in line)
    columns = [cell.strip() for cell in re.split("[┃│|]", heading) if cell.strip()]
    assert len(columns) == len(set(columns)) == 9
    assert printed(ndif("status", "--json")) == asyncio.run(table.status())


def test_status_shows_current_and_next_bookings(ndif: Ndif, table: Table) -> None:
    hour, now = timedelta(hours=1), datetime.now(timezone.utc)
    table.windows = [
        {"model": model, "start": start.isoformat(), "end": (start + 2 * hour).isoformat()}
        for model, start in (("org/a", now - hour), ("org/b", now + hour))
    ]
    lines = ndif("status").stdout.splitlines()
    (of_a,) = (line for line in lines if "org/a: " in line)
    (of_b,) = (line for line in lines if "org/b: " in line)
    assert of_a.endswith(", now")
    assert not of_b.endswith(", now")
    assert "Schedule: plan.ics, read every 30s; next change: none." in lines


def test_status_shows_booking_of_undeployed_model(ndif: Ndif, table: Table) -> None:
    ndif("deploy", "org/a", "org/b", "org/c")
    for entry in table.deployed.values():
        entry.replicas = []
    now, hour = datetime.now(timezone.utc), timedelta(hours=1)
    table.windows = [
        {"model": model, "start": start.isoformat(), "end": (now + 9 * hour).isoformat()}
        for model, start in (
            ("org/a", now - hour),
            ("org/b", now + hour),
            ("org/b", now + 2 * hour),
        )
    ]
    lines = ndif("status").stdout.splitlines()
    (of_a, of_b, of_c) = (line for line in lines if "NOT DEPLOYED" in line)
    assert "org/a" in of_a
    assert "booked now: it is about to be loaded" in of_a
    start = (now + hour).isoformat(sep=" ", timespec="minutes")
    assert f"NOT DEPLOYED, booked from {start} on" in of_b
    assert "booked" not in of_c


def test_queue_lists_each_request(ndif: Ndif, table: Table) -> None:
    output = ndif("queue").stdout
    for text in ("request-1", "ann", "running", "request-3", "bob", "1m 15s"):
        assert text in output, text
    assert printed(ndif("queue", "--json")) == asyncio.run(table.queue())
    table.running.clear()
    table.waiting.clear()
    assert ndif("queue").stdout == "No request is running or waiting.\n"


def test_jobs_list_shows_waiting_and_ended_jobs(ndif: Ndif) -> None:
    output = ndif("jobs", "list").stdout
    for text in ("0d9", "7c0", "ada@example.org", "QUEUED, number 2", "COMPLETED", "4KiB"):
        assert text in output, output
    assert len(printed(ndif("jobs", "list", "--json"))["jobs"]) == 2


def test_exported_file_can_be_deployed(ndif: Ndif, table: Table, here: Path) -> None:
    ndif("deploy", "org/a", "org/b=/models/b", "--dedicated")
    before = [deployment.config for deployment in table.deployed.values()]
    file = here / "models.yaml"
    file.write_text(ndif("export").stdout)
    assert yaml.safe_load(file.read_text()) == printed(ndif("export", "--json"))
    table.deployed.clear()
    assert ndif("deploy", "--deployment-config", file, "--sync").exit_code == 0
    assert [deployment.config for deployment in table.deployed.values()] == before


def test_env_shows_packages_of_server(ndif: Ndif) -> None:
    assert "transformers" in ndif("env").stdout
    assert "transformers" in printed(ndif("env", "--json", "--generation", "0.8"))["packages"]
    # Packages of the server alone are not part of the environment of blocks.
    assert "starlette" not in printed(ndif("env", "--json"))["packages"]
    assert "nnsight 0.5 is not installed here" in error(ndif("env", "--generation", "0.5"), 4)


def test_info_shows_configuration_of_server(ndif: Ndif, url: str) -> None:
    result = ndif("info", "--config")
    assert f"Configuration of the server at {url}" in result.stdout
    assert "NDIF_RUNNER_POOL" in result.stdout
    names = [setting["name"] for setting in printed(ndif("info", "--config", "--json"))["settings"]]
    assert names[0] == "NDIF_SESSION_ROOT"


def test_stop_fails_while_remote_server_still_answers(here: Path) -> None:
    table = Table()
    with serving(application(table)) as url:
        # This stand-in records the stop and keeps running.
        result = invoke("stop", "--url", url, "--token", TOKEN, "--timeout", "0.3")
        assert "still answers" in error(result, 1)
    assert table.stopped


def test_token_is_read_from_file(ndif: Ndif, here: Path) -> None:
    file = here / "token"
    file.write_text(f"{TOKEN}\n")
    assert ndif("queue", token=f"@{file}").exit_code == 0
    assert "cannot be read" in error(ndif("queue", token=f"@{file}2"), 1)


# Where there is no server

ASKING = [
    ["status"],
    ["queue"],
    ["export"],
    ["env"],
    ["stop"],
    ["restart"],
    ["info"],
    ["deploy", "org/a"],
    ["evict", "org/a"],
    ["scale", "org/a", "1"],
    ["kill", "x"],
    ["alerts", "list"],
    ["alerts", "test"],
    ["events"],
    ["callbacks", "list"],
    ["callbacks", "retry", "x"],
]


@pytest.mark.parametrize("arguments", ASKING, ids=" ".join)
def test_commands_without_local_server_exit_with_3(here: Path, arguments: list[str]) -> None:
    message = error(invoke(*arguments), 3)
    assert message.startswith("Error: No server is running here")
    assert "`ndif start`" in message
    assert not (here / "sessions").exists()


def test_unreachable_address_exits_with_3(here: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        message = error(invoke("status", "--url", f"127.0.0.1:{port}", "--token", "x"), 3)
    assert f"The server at http://127.0.0.1:{port} does not answer" in message


@pytest.mark.parametrize("url", ["http://", "ftp://127.0.0.1", "http://[", "http://127.0.0.1:x"])
def test_invalid_address_exits_with_3(here: Path, url: str) -> None:
    assert "does not answer" in error(invoke("status", "--url", url, "--token", "x"), 3)


def test_foreign_server_is_reported_as_not_ndif(here: Path) -> None:
    async def page(_: Any) -> PlainTextResponse:
        return PlainTextResponse("<html>", 404)

    with serving(Starlette(routes=[Route("/{path:path}", page)])) as url:
        message = error(invoke("status", "--url", url, "--token", "x"), 3)
    assert "is not an ndif server (HTTP 404)" in message


def test_logs_without_session_fail(here: Path) -> None:
    assert "no server has run with the session root" in error(invoke("logs"), 1)


def test_invalid_variable_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_API_PORT", "many")
    assert "NDIF_API_PORT is not valid" in error(invoke("status"), 1)


# Completion


def completed(ndif_arguments: list[str], incomplete: str) -> list[str]:
    from click.shell_completion import ShellComplete

    complete = ShellComplete(cli, {}, "ndif", "_NDIF_COMPLETE")
    return [item.value for item in complete.get_completions(ndif_arguments, incomplete)]


def test_shell_completes_commands_and_models(ndif: Ndif, url: str) -> None:
    ndif("deploy", "org/apple", "org/pear", "--no-wait")
    assert "evict" in completed([], "ev")
    options = ["--url", url, "--token", TOKEN]
    for command in ("evict", "scale", "restart"):
        assert completed([command, *options], "ORG/a") == ["org/apple"]
    assert completed(["evict", *options], "") == ["org/apple", "org/pear"]
    # Completion is empty without a server or with a wrong token.
    assert completed(["evict"], "") == []
    assert completed(["evict", "--url", url, "--token", "x"], "") == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("soon", "must be a duration, like"),
        ("-1", "must be at least 0.2s"),
        ("100ms", "must be at least 0.2s"),
        ("inf", "must be a duration, like"),
        ("nan", "must be a duration, like"),
    ],
)
def test_invalid_duration_option_is_rejected(ndif: Ndif, given: str, says: str) -> None:
    assert says in error(ndif("status", "--watch", given), 2)
