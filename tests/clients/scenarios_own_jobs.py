"""A client of any generation lists and ends its own jobs, beside a user with another key."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx
import nnsight
from comparing import raised, until
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

PROMPT = "The Eiffel Tower is in the city of"
OTHER = {"ndif-api-key": os.environ["TEST_OTHER_KEY"]}
OWN = {"ndif-api-key": os.environ["NDIF_API_KEY"]}
URL = os.environ["NDIF_HOST"]


class Context:
    """A model of the server, without weights in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        kind = getattr(nnsight, "TransformersModel", None) or nnsight.LanguageModel
        options = {"task": "text-generation"} if hasattr(nnsight, "TransformersModel") else {}
        self.remote = kind(name, **options)


def ask(method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """Send an HTTP request, as a user without a client does."""
    return httpx.request(method, f"{URL}{path}", headers=headers, verify=False)


def listed(headers: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the jobs that the server lists for a user, by id."""
    answer = ask("GET", "/requests", headers)
    assert answer.status_code == 200, answer.text
    return {job["id"]: job for job in answer.json()["requests"]}


def sent(context: Context, seconds: float) -> RemoteBackend:
    """Send a job that runs for `seconds` and is polled."""
    backend = RemoteBackend(context.remote.to_model_key(), blocking=False)
    with context.remote.trace(PROMPT, backend=backend):
        first = context.remote.transformer.h[0].output.save()
        time.sleep(seconds)
    return backend


def scenario_a_user_ends_their_own_job(context: Context) -> None:
    backend = sent(context, 600)
    job = backend.job_id
    until(lambda: listed(OWN)[job]["status"] == "RUNNING")
    assert job not in listed(OTHER)
    for method, path in (("DELETE", f"/request/{job}"), ("GET", f"/response/{job}")):
        refused = ask(method, path, OTHER)
        assert refused.status_code in (403, 404), refused.text
        assert "yours" in refused.text or "another user's" in refused.text
    # Another job waits behind it and is ended before it starts.
    waiting = sent(context, 0).job_id
    assert ask("DELETE", f"/request/{waiting}", OWN).json() == {"cancelled": True, "id": waiting}
    assert ask("DELETE", f"/request/{job}", OWN).status_code == 200
    error = raised(lambda: until(backend), Exception)
    assert "You have ended this job" in str(error), error
    ended = until(lambda: listed(OWN)[job]["ended"] and listed(OWN)[job])
    assert (ended["status"], ended["reason"]) == ("CANCELLED", "You have ended this job.")
    trace = ask("GET", f"/requests/{job}", OWN).json()
    assert (trace["error"], trace["stored"]) == ("You have ended this job.", False)
    assert ask("GET", f"/requests/{job}", OTHER).status_code == 404
    assert ask("DELETE", f"/request/{job}", OWN).status_code == 404


def scenario_usage_is_what_clients_were_told(context: Context) -> None:
    before = ask("GET", "/usage", OWN).json()["usage"]
    others = ask("GET", "/usage", OTHER).json()
    answers = []
    for _ in range(3):
        backend = sent(context, 0.2)
        until(backend)
        answers.append(ask("GET", f"/response/{backend.job_id}", OWN).json())
        until(lambda: listed(OWN)[answers[-1]["id"]]["ended"])
    with context.remote.trace(PROMPT, remote=True):
        context.remote.lm_head.output.save()
    (after,) = until(
        lambda: [
            row
            for row in ask("GET", "/usage", OWN).json()["usage"]
            if row["jobs"] == 4 + sum(earlier["jobs"] for earlier in before)
        ]
    )
    jobs = listed(OWN)
    live = next(iter(jobs.values()))
    assert live["status"] == "COMPLETED"
    assert live["result_bytes"] > 0
    ran = [jobs[answer["id"]]["execution_s"] for answer in answers]
    assert all(seconds > 0.2 for seconds in ran)
    for answer, seconds in zip(answers, ran, strict=True):
        if "meta" in answer:  # responses of the older wire have no cost
            assert answer["meta"]["execution_time"] == seconds
    polled = ask("GET", f"/requests/{answers[0]['id']}", OWN).json()
    assert (polled["error"], polled["stored"]) == (None, True)
    trace = ask("GET", f"/requests/{live['id']}", OWN).json()
    assert (trace["error"], trace["stored"]) == (None, False)
    took = {(step["by"], step["name"]): step["end"] - step["start"] for step in trace["steps"]}
    assert abs(took["runner", "execute"] - live["execution_s"]) < 0.1 + 0.1 * live["execution_s"]
    assert ask("GET", f"/requests/{live['id']}", OTHER).status_code == 404
    seconds = sum(ran) + live["execution_s"] + sum(row["execution_s"] for row in before)
    assert abs(after["execution_s"] - seconds) < 1e-6
    size = sum(jobs[answer["id"]]["result_bytes"] for answer in answers) + live["result_bytes"]
    assert after["result_bytes"] == size + sum(row["result_bytes"] for row in before)
    assert ask("GET", "/usage", OTHER).json() == others
