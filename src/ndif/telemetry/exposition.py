"""Metrics as text: of this process, or of all processes of this host that share a folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from ndif.telemetry.metrics_folder import VARIABLE, forget_ended

_OPEN = "application/openmetrics-text"
_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
_ESCAPED_HELP = str.maketrans({"\\": "\\\\", "\n": "\\n"})


class _Families:
    """A collector of metrics that are already computed."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = [*families]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._families


def exposition(accept: str, families: Iterable[Metric] = ()) -> tuple[bytes, str]:
    """Return the counted metrics and `families` as text, and the content type of the text.

    `accept` selects the type: Prometheus' own text format (version 0.0.4 or 1.0.0), or OpenMetrics 1.0.
    """
    registry = CollectorRegistry()
    folder = os.environ.get(VARIABLE)
    if folder:
        forget_ended(Path(folder))
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    else:
        registry.register(REGISTRY)
    registry.register(_Families(families))
    _, content_type = choose_encoder(accept)
    lines = _lines(registry.collect(), is_open=content_type.startswith(_OPEN))
    return "".join(lines).encode(), content_type


def _lines(families: Iterable[Metric], *, is_open: bool) -> Iterator[str]:
    """Yield the same lines as the library's encoders, in a quarter of their time.

    The encoders check and escape every name of every sample, and hundreds of models have many thousands of
    samples. All names here are plain. Sources: https://prometheus.io/docs/instrumenting/exposition_formats/
    and https://prometheus.io/docs/specs/om/open_metrics_spec/
    """
    pairs: dict[tuple[str, str], str] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" and not is_open else family.name
        kind = "untyped" if family.type == "unknown" and not is_open else family.type
        text = family.documentation.translate(_ESCAPED if is_open else _ESCAPED_HELP)
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        for sample in family.samples:
            if sample.labels:
                labels = []
                for pair in sorted(sample.labels.items()):
                    if (label := pairs.get(pair)) is None:
                        label = pairs[pair] = f'{pair[0]}="{pair[1].translate(_ESCAPED)}"'
                    labels.append(label)
                yield f"{sample.name}{{{','.join(labels)}}} {_number(sample.value)}\n"
            else:
                yield f"{sample.name} {_number(sample.value)}\n"
    if is_open:
        yield "# EOF\n"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
