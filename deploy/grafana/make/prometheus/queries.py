"""Queries of Prometheus about a server's metrics.

Each host of a server tells the state of the whole server, so that state is read with `max`, and counters
with `sum`.
"""

from __future__ import annotations

from typing import Any

from deploy.grafana.make.source import Source, Variable

OF_MODEL = 'instance=~"$instance", model=~"$model"'
HERE = 'instance=~"$instance"'


def _target(legend: str, query: str) -> dict[str, Any]:
    return {"editorMode": "code", "expr": query, "legendFormat": legend, "range": True}


def _variable(name: str, label: str, series: str) -> Variable:
    return Variable(name, label, f"label_values({series}, {name})")


PROMETHEUS = Source(
    type="prometheus",
    tag="ndif",
    link="NDIF",
    target=_target,
    variables=[
        _variable("instance", "Host", 'up{job="ndif"}'),
        _variable(
            "model",
            "Model",
            '{__name__=~"ndif_jobs_total|ndif_queue_depth|ndif_model_load_seconds_count"}',
        ),
    ],
    points="never",
)


def rate(metric: str, labels: str, by: str = "") -> str:
    """Return how often something happens in a second, by some labels."""
    return f"sum{_by(by)} (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(part: float, metric: str, labels: str, by: str = "") -> str:
    """Return the value that this part of a histogram's observations stays below, by some labels."""
    series = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', labels, series)})"


def quantiles(metric: str, labels: str) -> dict[str, str]:
    """Return three quantiles of all observations."""
    return {f"{part:.0%} stay below": quantile(part, metric, labels) for part in (0.5, 0.9, 0.99)}


def state(metric: str, labels: str, by: str) -> str:
    """Return a part of the server's state, of which every host tells the same."""
    return f"max by ({by}) ({metric}{{{labels}}})"


def model_state(metric: str, labels: str = "") -> str:
    """Return a part of the state of models, each in all of its generations."""
    every = ", ".join(filter(None, (OF_MODEL, labels)))
    return f"sum by (model) ({state(metric, every, 'model, generation')})"


def total(metric: str, labels: str = "") -> str:
    """Return a part of the state of all models together."""
    return f"sum ({model_state(metric, labels)})"


def share(part: str, whole: str) -> str:
    """Return a quotient."""
    return f"{part} / {whole}"


def free_and_total(metric: str, labels: str, by: str) -> tuple[str, str]:
    """Return the free and the whole size of what is measured as both."""
    free, whole = (state(metric, f'{labels}, kind="{kind}"', by) for kind in ("free", "total"))
    return free, whole


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


DISK_FREE, DISK_TOTAL = free_and_total("ndif_disk_bytes", HERE, "instance")
