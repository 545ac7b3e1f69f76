"""The built-in prober of the leader, which probes the models of its server one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from ndif.config.units import format_duration
from ndif.host.runtimes import Runtime
from ndif.probe.history import Histories
from ndif.probe.outcome import ProbeOutcome
from ndif.probe.probe import Target, probe
from ndif.schema.states import ProbeKind
from ndif.telemetry import metrics

logger = logging.getLogger(__name__)

_FIRST_S = 5.0
"""Longest wait before the first probe."""
_LOADING_S = 1800.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A model that should serve a generation, and the model's current state."""

    target: Target
    serves: bool
    problem: str | None
    """Reason why the model could not be deployed."""
    withdrawals: int
    """Number of evictions by an operator."""
    trust_remote_code: bool


@dataclass(eq=False)
class Prober:
    """Probes every watched model once per interval, and records the outcomes.

    Never runs two probes at once: probes are spread over the interval. A model that does not serve gets no
    trace, because a trace would load it. A model that is being loaded does not count as failed. All probes
    together count as one user of the queue.
    """

    watched: Callable[[], Sequence[Watched]]
    """Returns the models that should serve now."""
    runtimes: Callable[[], Mapping[str, Runtime]]
    url: str
    key: str = field(repr=False)
    interval_s: float
    timeout_s: float
    histories: Histories
    loading_s: float = _LOADING_S
    """Seconds after which a model that is still loading counts as failed."""
    _loading: dict[Target, float] = field(default_factory=dict, init=False)
    """Loop time at which a target was first seen not to serve."""
    _last_probed: dict[Target, float] = field(default_factory=dict, init=False)
    """Loop time of the last probe of each target."""

    async def run(self) -> None:
        """Probe until cancelled."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(min(self.interval_s, _FIRST_S))
        with TemporaryDirectory(prefix="ndif-probe-", ignore_cleanup_errors=True) as cache:
            while True:
                began, watched = loop.time(), list(self.watched())
                self._forget_others({model.target for model in watched})
                if watched:
                    await self._probe_next(watched, Path(cache))
                pause_s = self.interval_s / max(1, len(watched))
                await asyncio.sleep(max(0.0, began + pause_s - loop.time()))

    async def _probe_next(self, watched: Sequence[Watched], cache: Path) -> None:
        """Probe the model whose last probe is the oldest."""
        model = min(watched, key=lambda candidate: self._last_probed.get(candidate.target, 0.0))
        self._last_probed[model.target] = asyncio.get_running_loop().time()
        try:
            outcome = await self.probe(model, cache)
        except Exception:
            logger.exception("%s could not be probed", model.target.label)
        else:
            self._record(model, outcome)

    async def probe(self, model: Watched, cache: Path) -> ProbeOutcome:
        """Return the outcome for a model now; send a trace only if the model serves."""
        target = model.target
        history = self.histories.of(target, model.withdrawals)
        runtime = self.runtimes().get(target.generation)
        if model.trust_remote_code:
            return ProbeOutcome(
                ProbeKind.UNSUPPORTED, "Its client would run the repository's own code."
            )
        if not model.serves or runtime is None:
            return self._not_serving(model)
        self._loading.pop(target, None)
        first = history.first or self.histories.first_of(target)
        probed = await probe(target, runtime, self.url, self.key, cache, self.timeout_s)
        outcome = probed.against(first)
        if not outcome.failed or outcome.kind is ProbeKind.WRONG:
            return outcome
        # The probe may have failed only because its replica was restarted, evicted or lost.
        current = next(
            (candidate for candidate in self.watched() if candidate.target == target), None
        )
        if current is None:
            return ProbeOutcome(ProbeKind.LOADING, "The model was evicted.")
        return outcome if current.serves else self._not_serving(current)

    def _not_serving(self, model: Watched) -> ProbeOutcome:
        now = asyncio.get_running_loop().time()
        if model.problem is not None:
            return ProbeOutcome(ProbeKind.DOWN, model.problem)
        took_s = now - self._loading.setdefault(model.target, now)
        if took_s < self.loading_s:
            return ProbeOutcome(ProbeKind.LOADING, "The model is being loaded.")
        duration = format_duration(round(took_s))
        return ProbeOutcome(ProbeKind.DOWN, f"The model has been loading for {duration}.")

    def _record(self, model: Watched, outcome: ProbeOutcome) -> None:
        target = model.target
        self.histories.of(target, model.withdrawals).record(outcome, self.histories.now())
        metrics.probed(target.label, target.generation, outcome.kind.value, outcome.seconds)
        if outcome.failed:
            logger.warning(
                "the probe of %s by nnsight %s failed (%s): %s",
                *(target.label, target.generation, outcome.kind.value, outcome.reason),
            )

    def _forget_others(self, targets: set[Target]) -> None:
        self.histories.keep(targets)
        for times in (self._loading, self._last_probed):
            for target in times.keys() - targets:
                del times[target]
