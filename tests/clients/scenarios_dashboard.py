"""A client of nnsight 0.8 whose jobs a user views and ends on the server's dashboard."""

from __future__ import annotations

import time

import nnsight
from comparing import raised, until
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

PROMPT = "The Eiffel Tower is in the city of"


class Context:
    """A model of the server, without weights in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.remote = nnsight.TransformersModel(name, task="text-generation")


def scenario_a_result_is_left(context: Context) -> None:
    backend = RemoteBackend(context.remote.to_model_key(), blocking=False)
    with context.remote.trace(PROMPT, backend=backend):
        first = context.remote.transformer.h[0].output.save()
    until(backend)


def scenario_a_job_runs_until_somebody_ends_it(context: Context) -> None:
    def run() -> None:
        with context.remote.trace(PROMPT, remote=True):
            first = context.remote.transformer.h[0].output.save()
            time.sleep(600)

    assert "You have ended this job" in str(raised(run, Exception))
