"""A client of any generation with one of the models of a server with many models."""

from __future__ import annotations

import itertools
import time
from typing import Any

import nnsight
from comparing import assert_equal, until
from nnsight import CONFIG

PROMPT = "The Eiffel Tower is in the city of"
LONG_S = 3.0


class Context:
    """The model on the server, by its name, and in this process, from its folder."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        if CONFIG.API.APIKEY is None:  # 0.7 cannot poll without a key
            CONFIG.API.APIKEY = ""
        self.name = name
        self.folder = folder
        self.remote = self._model(name)

    def _model(self, place: str, **options: Any) -> Any:
        if hasattr(nnsight, "TransformersModel"):
            task = "fill-mask" if "bert" in self.name else "text-generation"
            return nnsight.TransformersModel(place, task=task, **options)
        return nnsight.LanguageModel(place, **options)

    @property
    def local(self) -> Any:
        """The same model in this process."""
        return self._model(self.folder, dispatch=True)


def output_of(model: Any, remote: bool) -> Any:
    """Return the model's answer to a prompt, with an edit of a layer."""
    prompt = "The Eiffel Tower is in [MASK]." if hasattr(model, "bert") else PROMPT
    with model.trace(prompt, remote=remote):
        if hasattr(model, "transformer"):
            model.transformer.h[0].output[:] *= 2
            logits = model.lm_head.output.save()
        elif hasattr(model, "bert"):
            model.bert.encoder.layer[0].output[:] *= 2
            logits = model.cls.output.save()
        else:
            model.model.layers[0].output[:] *= 2
            logits = model.lm_head.output.save()
    return logits


def scenario_a_trace(context: Context) -> None:
    assert_equal(output_of(context.remote, True), output_of(context.local, False))


def scenario_a_failure(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            {}["missing"]  # the user's mistake

    assert "KeyError" in failure(run)


def scenario_refused(context: Context) -> None:
    message = failure(lambda: output_of(context.remote, True))
    assert "tests/llama" in message, message


def scenario_a_block_that_prints_too_much(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            print("x" * (9 << 20))

    message = failure(run)
    assert "NDIF_MAX_LOG_BYTES" in message, message


def processes_of(model: Any) -> list[int]:
    """Return the process of each of two traces."""
    processes = []
    for _ in range(2):
        with model.trace(PROMPT, remote=True):
            import os

            process = [os.getpid()].save()
        processes.append(process[0])
    return processes


def scenario_one_process_runs_all(context: Context) -> None:
    first, second = processes_of(context.remote)
    assert first == second


def scenario_what_untrusted_users_may_not(context: Context) -> None:
    message = failure(lambda: processes_of(context.remote))
    assert "module 'os' is not available on this server" in message, message


def failure(call: Any) -> str:
    """Return the error of a trace, which must fail."""
    try:
        call()
    except Exception as error:
        return str(error)
    raise AssertionError("it was served")


def end_of(job: Any) -> str:
    """Return the last message of a polled job that fails."""

    def message() -> str:
        try:
            result = job()
        except Exception as error:
            return str(error)
        assert result is None
        return ""

    last_message: str = until(message)
    return last_message


def runs_for(model: Any, seconds: float) -> Any:
    """Send a job that takes `seconds`, and saves its start and end."""
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        began = time.time()
        time.sleep(seconds)
        times = [began, time.time()].save()
    return tracer.backend


def times_of(jobs: list[Any]) -> list[Any]:
    """Return the start and end of each job."""
    return [until(job)["times"] for job in jobs]


def scenario_three_replicas_share_the_load(context: Context) -> None:
    times = times_of([runs_for(context.remote, 0.5) for _ in range(9)])
    in_turn = sorted(times)
    # At most three jobs ran at once, and at some time exactly three.
    most = max(sum(b <= began < e for b, e in in_turn) for began, _ in in_turn)
    assert most == 3, times


def scenario_one_at_a_time(context: Context) -> None:
    times = times_of([runs_for(context.remote, 0.5) for _ in range(3)])
    in_turn = sorted(times)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(in_turn)), times


def scenario_four_long_jobs(context: Context) -> None:
    times = times_of([runs_for(context.remote, LONG_S) for _ in range(4)])
    assert all(ended - began >= LONG_S for began, ended in times)


def scenario_killed(context: Context) -> None:
    """Two jobs that never end; an operator ends both."""
    for job in [runs_for(context.remote, 600) for _ in range(2)]:
        message = end_of(job)
        assert "operator has ended this job" in message, message


def scenario_evicted(context: Context) -> None:
    """The running job may end; the waiting job gets a message."""
    # The job runs long enough for a command of the operator.
    running, waiting = (runs_for(context.remote, 4 * LONG_S) for _ in range(2))
    message = end_of(waiting)
    assert "taken 'tests/gpt2' off the server" in message, message
    times_of([running])


def scenario_the_server_stops_meanwhile(context: Context) -> None:
    """A client at a live channel gets the reason of the end."""

    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            time.sleep(600)
            context.remote.lm_head.output.save()

    message = failure(run)
    assert "The server was stopped before this job was done." in message, message


_sent: list[Any] = []


def scenario_fifty_jobs_are_sent(context: Context) -> None:
    _sent[:] = [runs_for(context.remote, 0.02) for _ in range(50)]


def scenario_a_long_job_is_sent(context: Context) -> None:
    _sent[:] = [runs_for(context.remote, LONG_S)]


def scenario_all_that_was_sent_is_answered(context: Context) -> None:
    assert all(ended > began for began, ended in times_of(_sent))


def scenario_the_states_that_models_can_have(context: Context) -> None:
    status = nnsight.status()
    states = {
        name: getattr(status[name]["state"], "value", status[name]["state"]) for name in status
    }
    expected = {"gpt2": "RUNNING", "llama": "NOT DEPLOYED", "none": "DOWN"}
    kinds = {"gpt2": "Pilot-Only", "llama": "Pilot-Only", "none": "Dedicated"}
    if not hasattr(nnsight, "TransformersModel"):
        expected["scheduled"], kinds["scheduled"] = "NOT DEPLOYED", "Scheduled"
        types = {name: status[name]["type"].value for name in status}
        assert types == {f"tests/{name}": kind for name, kind in kinds.items()}, types
    assert states == {f"tests/{name}": state for name, state in expected.items()}, states
    assert status.status.value == "UP"
    assert "tests/llama" in str(status)
    assert nnsight.is_model_running("tests/gpt2")
    assert not nnsight.is_model_running("tests/llama")

    entries = {e["repo_id"]: e for e in nnsight.status(raw=True)["deployments"].values()}
    assert {name: entry["deployment_level"] for name, entry in entries.items()} == {
        "tests/gpt2": "HOT",
        "tests/llama": "WARM",
        "tests/none": "HOT",
        "tests/scheduled": "COLD",
    }
    for entry in (entries["tests/gpt2"], entries["tests/llama"]):
        assert entry["config"]["model_type"] in entry["repo_id"]
        assert entry["parameters"] > 1000
    assert len(entries["tests/gpt2"]["nodes"]) == 1
    (window,) = entries["tests/scheduled"]["schedule"]
    assert window["start"] < window["end"]
