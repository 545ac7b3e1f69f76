"""The question to the process of a probe, and the outcome that it answers with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ndif.schema.states import ProbeKind


@dataclass(frozen=True, slots=True)
class Question:
    """The model that a process is to probe, and its way to the server."""

    url: str
    key: str
    cache: str
    """The client's folder of a model's config and tokenizer."""
    repo_id: str
    revision: str | None
    task: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Value:
    """A sample of a value, by which it is compared with those of other probes."""

    shape: tuple[int, ...]
    dtype: str
    tolerance: float
    """Difference that is no difference, as a share of the numbers' spread."""
    numbers: tuple[float, ...]
    tokens: tuple[int, ...]
    """The tokens of the highest scores; empty for a model that predicts none."""

    def differs_from(self, other: Value) -> str | None:
        """Return the sentence that this is another value; None if it is the same but for rounding."""
        if (self.shape, len(self.numbers)) != (other.shape, len(other.numbers)):
            return (
                f"The value has the shape {list(self.shape)}, and had {list(other.shape)} before."
            )
        mean = math.fsum(other.numbers) / max(1, len(other.numbers))
        spread = math.dist(other.numbers, [mean] * len(other.numbers))
        distance = math.dist(self.numbers, other.numbers)
        # A replica on another device may be loaded in another type.
        allowed = max(self.tolerance, other.tolerance)
        if distance <= allowed * max(spread, abs(mean), 1e-9):
            return None
        return (
            f"The value is another than in the first probe of this model: it is {distance:.3g} away, and "
            f"its numbers spread over {spread:.3g}."
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one probe."""

    kind: ProbeKind
    reason: str = ""
    """Sentence that says what is wrong; empty if nothing is."""
    seconds: float | None = None
    """Seconds from sending the trace to its value, its wait in the queue included; None without a value."""
    value: Value | None = None

    @property
    def failed(self) -> bool:
        """Return True if the model is not served as it should be."""
        return self.kind not in (ProbeKind.OK, ProbeKind.LOADING, ProbeKind.UNSUPPORTED)

    def against(self, first: Value | None) -> Outcome:
        """Return this outcome, or a wrong one if its value is another than the first of the model."""
        if first is None or self.value is None:
            return self
        reason = self.value.differs_from(first)
        return (
            self
            if reason is None
            else Outcome(ProbeKind.WRONG, reason, self.seconds, value=self.value)
        )
