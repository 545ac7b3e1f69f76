"""Metrics as text: of this process, or of all processes of this host that share a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from ndif.telemetry.metrics_folder import VARIABLE, forget_ended


class _Families:
    """Metrics that were worked out already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = [*families]

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield from self._families


def exposition(accept: str, families: Iterable[Metric] = ()) -> tuple[bytes, str]:
    """Return what is counted, and `families`, as text of the type that `accept` asks for; and that type.

    The type is Prometheus' own (version 0.0.4 or 1.0.0), or OpenMetrics 1.0.
    """
    registry = CollectorRegistry()
    folder = os.environ.get(VARIABLE)
    if folder:
        forget_ended(Path(folder))
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    else:
        registry.register(REGISTRY)
    registry.register(_Families(families))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
