"""A client of any generation with a server that it reaches by https alone."""

from __future__ import annotations

import os
import socket
from typing import Any

import httpx
import nnsight
import torch
from comparing import assert_equal, until
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

PROMPT = "The Eiffel Tower is in the city of"
URL = os.environ["NDIF_HOST"]

_resolve = socket.getaddrinfo


def _resolve_here(host: Any, *arguments: Any, **options: Any) -> Any:
    """Resolve the server's example name to this machine."""
    name = "127.0.0.1" if host in ("ndif.example.org", b"ndif.example.org") else host
    return _resolve(name, *arguments, **options)


socket.getaddrinfo = _resolve_here


class Context:
    """The model on the server, by its name, and in this process, from its folder."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        CONFIG.API.APIKEY = CONFIG.API.APIKEY or ""
        self.name = name
        kind = getattr(nnsight, "TransformersModel", None) or nnsight.LanguageModel
        options = {"task": "text-generation"} if hasattr(nnsight, "TransformersModel") else {}
        self.remote = kind(name, **options)
        self.local = kind(folder, dispatch=True, **options)


def hidden(model: Any, remote: bool) -> torch.Tensor:
    """Return a layer's output after an edit of an earlier layer."""
    with model.trace(PROMPT, remote=remote):
        model.transformer.h[0].output[:] *= 2
        output = model.transformer.h[2].output.save()
    return output


def scenario_everything_goes_through_https(context: Context) -> None:
    # Over the live channel, a WebSocket or Socket.IO.
    assert_equal(hidden(context.remote, True), hidden(context.local, False))
    assert nnsight.status().status.value == "UP"
    assert nnsight.is_model_running(context.name)

    backend = RemoteBackend(context.remote.to_model_key(), blocking=False)
    with context.remote.trace(PROMPT, backend=backend):
        context.remote.transformer.h[0].output.save()

    def completed() -> Any:
        answer = httpx.get(f"{URL}/response/{backend.job_id}").json()
        assert answer["status"] != "ERROR", answer
        return answer if answer["status"] == "COMPLETED" else None

    answer = until(completed)
    assert f"{URL}/results/{backend.job_id}" in str(answer), answer
    assert backend() is not None

    # Pages of any site may read this path, and no other path.
    page = {"Origin": "https://a.page.example"}
    assert httpx.get(f"{URL}/status", headers=page).headers["Access-Control-Allow-Origin"] == "*"
    assert httpx.post(f"{URL}/request", headers=page).status_code == 403
    # The server's own pages are of the same site.
    assert httpx.post(f"{URL}/request", headers={"Origin": URL}).status_code == 400
    built = httpx.get(f"{URL}/hub/api/models/{context.name}")
    assert built.status_code == 200, built.text
