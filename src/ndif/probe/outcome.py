"""Input and output of a probe's process: `Question` and `ProbeOutcome`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ndif.schema.states import ProbeKind


@dataclass(frozen=True, slots=True)
class Question:
    """The model to probe, and the server's address."""

    url: str
    key: str
    cache: str
    """Folder in which the client caches a model's config and tokenizer."""
    repo_id: str
    revision: str | None
    task: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Value:
    """A sample of a traced value, for comparison with other probes."""

    shape: tuple[int, ...]
    dtype: str
    tolerance: float
    """Largest distance of equal values, as a fraction of their spread or mean, whichever is larger."""
    numbers: tuple[float, ...]
    tokens: tuple[int, ...]
    """Ids of the tokens with the highest scores; empty for a model that predicts none."""

    def differs_from(self, other: Value) -> str | None:
        """Return a sentence if the values differ by more than rounding, else None."""
        if (self.shape, len(self.numbers)) != (other.shape, len(other.numbers)):
            return (
                f"The value has the shape {list(self.shape)}, and had {list(other.shape)} before."
            )
        mean = math.fsum(other.numbers) / max(1, len(other.numbers))
        spread = math.dist(other.numbers, [mean] * len(other.numbers))
        distance = math.dist(self.numbers, other.numbers)
        # Replicas on different devices may be loaded in different dtypes.
        allowed = max(self.tolerance, other.tolerance)
        if distance <= allowed * max(spread, abs(mean), 1e-9):
            return None
        return (
            f"The value differs from the first probe of this model: the distance is {distance:.3g}, and "
            f"the numbers spread over {spread:.3g}."
        )


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """The end of one probe."""

    kind: ProbeKind
    reason: str = ""
    """Sentence on the failure; empty if there is none."""
    seconds: float | None = None
    """Seconds from sending the trace to its value, including the queue; None without a value."""
    value: Value | None = None

    @property
    def failed(self) -> bool:
        """Return True for every kind but OK, LOADING and UNSUPPORTED."""
        return self.kind not in (ProbeKind.OK, ProbeKind.LOADING, ProbeKind.UNSUPPORTED)

    def against(self, first: Value | None) -> ProbeOutcome:
        """Return this outcome, or a WRONG one if its value differs from `first`."""
        if first is None or self.value is None:
            return self
        reason = self.value.differs_from(first)
        return (
            self
            if reason is None
            else ProbeOutcome(ProbeKind.WRONG, reason, self.seconds, value=self.value)
        )
