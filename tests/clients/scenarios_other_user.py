"""A client of any generation that runs as another user of the machine than the local server."""

from __future__ import annotations

import contextlib
import os
import symtable  # noqa: F401 - a client imports it while it sends, as a user who cannot read the file
from collections.abc import Iterator
from typing import Any

import nnsight
import torch
from comparing import assert_equal, raised, until
from nnsight import CONFIG
from nnsight.intervention.backends.remote import RemoteBackend

PROMPT = "The Eiffel Tower is in the city of"
USER = int(os.environ["TEST_USER"])


class Context:
    """The model on the server, by its name, and in this process, from its folder."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        kind = getattr(nnsight, "TransformersModel", None) or nnsight.LanguageModel
        options = {"task": "text-generation"} if hasattr(nnsight, "TransformersModel") else {}
        self.remote = kind(name, **options)
        self.local = kind(folder, dispatch=True, **options)


@contextlib.contextmanager
def another_user(key: str) -> Iterator[None]:
    """Send as another user of this machine, with this NDIF_API_KEY."""
    CONFIG.API.APIKEY = key
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)


def hidden(model: Any, remote: bool) -> torch.Tensor:
    """Return a layer's output after an edit of an earlier layer."""
    with model.trace(PROMPT, remote=remote):
        model.transformer.h[0].output[:] *= 2
        output = model.transformer.h[2].output.save()
    return output


def scenario_the_token_lets_in(context: Context) -> None:
    expected = hidden(context.local, False)
    # The owner needs no key.
    assert_equal(hidden(context.remote, True), expected)
    for key in ("", "a-key-of-the-public-server"):
        with another_user(key):
            error = raised(lambda: hidden(context.remote, True), Exception)
        assert "export NDIF_API_KEY" in str(error), error
    with another_user(os.environ["TEST_TOKEN"]):
        assert_equal(hidden(context.remote, True), expected)
        backend = RemoteBackend(context.remote.to_model_key(), blocking=False)
        with context.remote.trace(PROMPT, backend=backend):
            first = context.remote.transformer.h[0].output.save()
        result = until(backend)
    assert "first" in result
