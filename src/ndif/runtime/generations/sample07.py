"""A payload as a client of nnsight 0.6 or 0.7 would send it, made here to rehearse with."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.backends.base import Backend
from nnsight.schema.request import RequestModel


class _Keep(Backend):  # type: ignore[misc]
    """Keeps what would be sent."""

    payload: bytes

    def __call__(self, tracer: Any) -> None:
        """See `Backend`."""
        interventions = super().__call__(tracer)
        request = RequestModel(interventions=interventions, tracer=tracer)
        self.payload = request.serialize(False)


def sample(model: Any, prompt: str) -> bytes:
    """A trace of `model` that saves the first thing it puts out."""
    kept = _Keep()
    with model.trace(prompt, backend=kept):
        first = model.output[0].save()  # noqa: F841 - what comes back
    return kept.payload
