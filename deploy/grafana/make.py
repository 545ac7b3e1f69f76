"""Write the dashboards: `python deploy/grafana/make.py`, after a change of this file.

A dashboard is rows of panels; ids and places follow from their order. Each host of a server tells the state
of the whole server, so that state is read with `max`, and counters with `sum`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"

_SCHEMA = 39
"""Version of the form of dashboards, that of Grafana 10.4; later ones read it."""
_COLUMNS = 24
_HEIGHT, _STAT_HEIGHT = 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_MODEL = 'instance=~"$instance", model=~"$model"'
_HERE = 'instance=~"$instance"'
_RED, _YELLOW, _GREEN = "red", "yellow", "green"


@dataclass(frozen=True)
class Panel:
    """Curves, or the last value of each query, with the unit of their values."""

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]
    """Queries by the legend of their series."""
    is_stacked: bool = False
    most: float | None = None
    """Greatest value of the axis; None where the values say."""

    type = "timeseries"
    height = _HEIGHT

    def fields(self) -> dict[str, Any]:
        """Return what Grafana draws the panel by."""
        custom = {
            "fillOpacity": 30 if self.is_stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if self.is_stacked else "none"},
        }
        most = {} if self.most is None else {"max": self.most}
        return {
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, **most, "custom": custom},
                "overrides": [],
            },
            "options": {
                "legend": {
                    "displayMode": "table",
                    "placement": "bottom",
                    "calcs": ["lastNotNull", "max"],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": [
                {
                    "refId": chr(ord("A") + number),
                    "datasource": _SOURCE,
                    "editorMode": "code",
                    "expr": expr,
                    "legendFormat": legend,
                    "range": True,
                }
                for number, (legend, expr) in enumerate(self.queries.items())
            ],
        }


@dataclass(frozen=True)
class Stat(Panel):
    """The last value, coloured from a step on."""

    steps: Sequence[tuple[float | None, str]] = ((None, _GREEN),)
    """Colours by the value from which on they apply; None: from below all others."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that stand for values."""

    type = "stat"
    height = _STAT_HEIGHT

    def fields(self) -> dict[str, Any]:
        """See `Panel.fields`."""
        options = {value: {"text": text} for value, text in self.words.items()}
        return {
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    "mappings": [{"type": "value", "options": options}] if options else [],
                    "thresholds": {
                        "mode": "absolute",
                        "steps": [{"value": value, "color": color} for value, color in self.steps],
                    },
                },
                "overrides": [],
            },
            "options": {
                "colorMode": "background",
                "graphMode": "none",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "textMode": "auto",
            },
            "targets": super().fields()["targets"],
        }


@dataclass(frozen=True)
class AlertList:
    """The alerts that fire, or soon will, of every data source: the list reads no variable."""

    title: str
    description: str

    type = "alertlist"
    height = _HEIGHT

    def fields(self) -> dict[str, Any]:
        """See `Panel.fields`."""
        return {
            "options": {
                "alertName": "Ndif",
                "dashboardAlerts": False,
                "groupBy": [],
                "groupMode": "default",
                "maxItems": 30,
                "sortOrder": 3,
                "stateFilter": {"firing": True, "pending": True, "error": True},
                "viewMode": "list",
            }
        }


AnyPanel = Panel | AlertList
Rows = Mapping[str, Sequence[AnyPanel]]


def dashboard(uid: str, title: str, description: str, rows: Rows) -> dict[str, Any]:
    """Return a dashboard as Grafana reads it."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["ndif"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "NDIF",
                "tags": ["ndif"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [*_variables()]},
        "annotations": {"list": []},
        "panels": [*_panels(rows)],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }
    every_model = '{__name__=~"ndif_jobs_total|ndif_queue_depth|ndif_model_load_seconds_count"}'
    for name, label, query in (
        ("instance", "Host", 'label_values(up{job="ndif"}, instance)'),
        ("model", "Model", f"label_values({every_model}, model)"),
    ):
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,  # with the time range: models come and go
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(rows: Rows) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for heading, panels in rows.items():
        yield {
            "id": number,
            "type": "row",
            "title": heading,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        width, height = _COLUMNS // len(panels), max(panel.height for panel in panels)
        for place, panel in enumerate(panels):
            yield {
                "id": number + 1 + place,
                "type": panel.type,
                "title": panel.title,
                "description": panel.description,
                "datasource": _SOURCE,
                "gridPos": {"x": place * width, "y": y + 1, "w": width, "h": height},
                **panel.fields(),
            }
        number += 1 + len(panels)
        y += 1 + height


# Queries


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
    every = ", ".join(filter(None, (_OF_MODEL, labels)))
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


# Dashboards

_GPU_FREE, _GPU_TOTAL = free_and_total("ndif_gpu_memory_bytes", _HERE, "node, gpu")
_CPU_FREE, _CPU_TOTAL = free_and_total("ndif_cpu_memory_bytes", _HERE, "node")
_DISK_FREE, _DISK_TOTAL = free_and_total("ndif_disk_bytes", _HERE, "instance")
_FAILED = rate("ndif_jobs_total", f'{_OF_MODEL}, status!="COMPLETED"', "model")
_ENDED = rate("ndif_jobs_total", _OF_MODEL, "model")
_ACCEPTED = rate("ndif_submitted_bytes_count", _HERE)
_5XX = rate("ndif_http_requests_total", f'{_HERE}, status=~"5.."')
_ZERO_IS_BAD = ((None, _RED), (1, _GREEN))
_ANY_IS_BAD = ((None, _GREEN), (1, _RED))

_BY_STATUS = Panel(
    "Jobs that end, by status",
    "COMPLETED, ERROR, or ENDED where the process that ran it was gone.",
    "suffix:jobs/s",
    {"{{status}}": rate("ndif_jobs_total", _OF_MODEL, "status")},
    is_stacked=True,
)
_WAITING = Panel(
    "Waiting",
    "From the receipt of a job to its dispatch to a replica.",
    "s",
    quantiles("ndif_job_wait_seconds", _OF_MODEL),
)
_FAILING = Panel(
    "Share of jobs that fail, by model",
    "Jobs that end with an error, the users' own included, of all that end.",
    "percentunit",
    {"{{model}}": share(_FAILED, _ENDED)},
    most=1,
)

OVERVIEW: Rows = {
    "Now": [
        Stat(
            "Leader",
            "Without a process that leads, jobs are accepted and none runs: `ndif logs dispatcher`.",
            "none",
            {"": f"max (ndif_leader_up{{{_HERE}}})"},
            steps=_ZERO_IS_BAD,
            words={"0": "nobody leads", "1": "leads"},
        ),
        Stat(
            "Stores that are away",
            "Broker, object store or accounts, as the host sees it that sees the fewest.",
            "short",
            {"": f"sum (1 - min by (store) (ndif_store_up{{{_HERE}}}))"},
            steps=_ANY_IS_BAD,
        ),
        Stat(
            "Problems",
            "`ndif status` has a sentence for each.",
            "short",
            {"": f"max (ndif_problems{{{_HERE}}})"},
            steps=((None, _GREEN), (1, _YELLOW)),
        ),
        Stat("Jobs that wait", "Of all models.", "short", {"": total("ndif_queue_depth")}),
        Stat("Jobs that run", "Of all models.", "short", {"": total("ndif_jobs_running")}),
        Stat(
            "Replicas that run",
            "Copies of models that take jobs.",
            "short",
            {"": total("ndif_replicas", 'state="RUNNING"')},
        ),
        Stat(
            "GPUs withdrawn",
            "A GPU on which replicas failed takes no models for an hour.",
            "short",
            {"": f"sum ({state('ndif_gpu_withdrawn', _HERE, 'node, gpu')})"},
            steps=((None, _GREEN), (1, _YELLOW)),
        ),
        Stat(
            "Free disk",
            "Of the host that has the least, for results and large requests.",
            "percentunit",
            {"": f"min ({share(_DISK_FREE, _DISK_TOTAL)})"},
            steps=((None, _RED), (0.05, _YELLOW), (0.15, _GREEN)),
        ),
    ],
    "Alerts": [
        AlertList("Alerts now", "docs/monitoring.md says of each what to do."),
        Panel(
            "Alerts over time",
            "Alerts that fire, or will once their cause has lasted.",
            "short",
            {
                "{{alertname}} {{alertstate}}": "count by (alertname, alertstate) "
                '(ALERTS{alertname=~"Ndif.*"})'
            },
            is_stacked=True,
        ),
    ],
    "Jobs": [
        _BY_STATUS,
        _WAITING,
        _FAILING,
    ],
}

JOBS: Rows = {
    "Throughput": [
        _BY_STATUS,
        Panel(
            "Jobs that end, by model",
            "All of a model's jobs, whatever their end.",
            "suffix:jobs/s",
            {"{{model}}": _ENDED},
            is_stacked=True,
        ),
        Panel(
            "Results",
            "Bytes of results, as they are sent or stored.",
            "Bps",
            {"{{model}}": rate("ndif_job_result_bytes_sum", _OF_MODEL, "model")},
            is_stacked=True,
        ),
    ],
    "Latency": [
        _WAITING,
        Panel(
            "Execution",
            "Time that a job's block runs.",
            "s",
            quantiles("ndif_job_execution_seconds", _OF_MODEL),
        ),
        Panel(
            "Time in each status",
            "90 % of jobs leave a status within this time.",
            "s",
            {"{{status}}": quantile(0.9, "ndif_job_status_seconds", _HERE, "status")},
        ),
    ],
    "Latency, by model": [
        Panel(
            "Waiting, by model",
            "90 % of a model's jobs are dispatched within this time.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_job_wait_seconds", _OF_MODEL, "model")},
        ),
        Panel(
            "Execution, by model",
            "90 % of a model's blocks run for less than this time.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_job_execution_seconds", _OF_MODEL, "model")},
        ),
    ],
    "Queues": [
        Panel(
            "Queue depth",
            "Jobs that wait for a replica.",
            "short",
            {"{{model}}": model_state("ndif_queue_depth")},
            is_stacked=True,
        ),
        Panel(
            "Jobs that run",
            "Jobs on replicas, each of which runs one.",
            "short",
            {"{{model}}": model_state("ndif_jobs_running")},
            is_stacked=True,
        ),
        Panel(
            "Processing rate",
            "Queues grow while more jobs are accepted than end.",
            "suffix:jobs/s",
            {"accepted": _ACCEPTED, "ended": rate("ndif_jobs_total", _HERE)},
        ),
        Panel(
            "Time to empty a queue",
            "By its depth, and by how many of its jobs end in a second.",
            "s",
            {"{{model}}": share(model_state("ndif_queue_depth"), f"({_ENDED} > 0)")},
        ),
    ],
    "Errors and refusals": [
        Panel(
            "Jobs that fail, by model",
            "Jobs that end with an error, the users' own included.",
            "suffix:jobs/s",
            {"{{model}}": _FAILED},
            is_stacked=True,
        ),
        _FAILING,
        Panel(
            "Refusals, by reason",
            "Jobs that were not accepted. broker, disk, store, accounts, unavailable and failure are the "
            "server's own reasons.",
            "suffix:jobs/s",
            {"{{reason}}": rate("ndif_refusals_total", _HERE, "reason")},
            is_stacked=True,
        ),
    ],
    "Sizes": [
        Panel(
            "Size of requests",
            "90 % of payloads are smaller. The newest clients send envelopes, older ones headers.",
            "bytes",
            {"{{wire}}": quantile(0.9, "ndif_submitted_bytes", _HERE, "wire")},
        ),
        Panel(
            "Size of results",
            "90 % of a model's results are smaller.",
            "bytes",
            {"{{model}}": quantile(0.9, "ndif_job_result_bytes", _OF_MODEL, "model")},
        ),
        Panel(
            "Peak memory of jobs",
            "90 % of a model's jobs take less beside the model, of the GPU or of their process.",
            "bytes",
            {"{{model}}": quantile(0.9, "ndif_job_peak_memory_bytes", _OF_MODEL, "model")},
        ),
    ],
}

MODELS: Rows = {
    "Probes": [
        Panel(
            "Models that answer their probe",
            "1 if the last trace that the server sent itself got the right value; 0 if it did not.",
            "short",
            {
                "{{model}}, nnsight {{generation}}": state(
                    "ndif_probe_up", _OF_MODEL, "model, generation"
                )
            },
            most=1,
        ),
        Panel(
            "Time of probes, by model",
            "90 % of them have their value within this time, their wait in the queue included.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_probe_seconds", _OF_MODEL, "model")},
        ),
        Panel(
            "Probes, by outcome",
            "Probes of the last hour. loading: the model was being loaded, which is no failure.",
            "short",
            {"{{outcome}}": f"sum by (outcome) (increase(ndif_probes_total{{{_OF_MODEL}}}[1h]))"},
            is_stacked=True,
        ),
    ],
    "Replicas": [
        Panel(
            "Replicas, by state",
            "RUNNING takes jobs, DEPLOYING loads, UNHEALTHY does not answer, WARM is in the CPU's memory.",
            "short",
            {
                "{{state}}": "sum by (state) "
                f"({state('ndif_replicas', _OF_MODEL, 'model, generation, state')})"
            },
            is_stacked=True,
        ),
        Panel(
            "Replicas that run, by model",
            "Copies of a model that take jobs.",
            "short",
            {"{{model}}": model_state("ndif_replicas", 'state="RUNNING"')},
            is_stacked=True,
        ),
        Panel(
            "Replicas that are wanted, by model",
            "By the autoscaler or an operator; a model that is away is loaded for its next job.",
            "short",
            {"{{model}}": model_state("ndif_replicas_desired")},
            is_stacked=True,
        ),
    ],
    "Loads": [
        Panel(
            "Load time, by source",
            "90 % of replicas come up within this time: from the disk, or from the CPU's memory.",
            "s",
            {"from {{source}}": quantile(0.9, "ndif_model_load_seconds", _OF_MODEL, "source")},
        ),
        Panel(
            "Load time, by model",
            "Mean time to bring a replica up.",
            "s",
            {
                "{{model}} from {{source}}": share(
                    rate("ndif_model_load_seconds_sum", _OF_MODEL, "model, source"),
                    f"({rate('ndif_model_load_seconds_count', _OF_MODEL, 'model, source')} > 0)",
                )
            },
        ),
        Panel(
            "Loads in an hour",
            "Replicas that came up, by where they came from.",
            "short",
            {
                "from {{source}}": "sum by (source) "
                f"(increase(ndif_model_load_seconds_count{{{_OF_MODEL}}}[1h]))"
            },
            is_stacked=True,
        ),
    ],
    "Evictions and failures": [
        Panel(
            "Evictions in an hour",
            "Replicas that left their device. Models that leave often displace each other.",
            "short",
            {
                "{{model}} to {{destination}}": "sum by (model, destination) "
                f"(increase(ndif_evictions_total{{{_OF_MODEL}}}[1h]))"
            },
            is_stacked=True,
        ),
        Panel(
            "Loads that failed",
            "Since the server was started; `ndif status` says why.",
            "short",
            {"{{model}}": f"sum by (model) (ndif_model_load_failures_total{{{_OF_MODEL}}})"},
        ),
        Panel(
            "Replicas that were lost",
            "Since the server was started: their process ended by itself, or with its node.",
            "short",
            {"{{model}}": f"sum by (model) (ndif_replicas_lost_total{{{_OF_MODEL}}})"},
        ),
    ],
    "GPU memory": [
        Panel(
            "GPU memory, by model",
            "Memory that a model's replicas hold on GPUs.",
            "bytes",
            {"{{model}}": model_state("ndif_model_gpu_memory_bytes")},
            is_stacked=True,
        ),
        Panel(
            "GPU memory in use, by device",
            "Memory of each GPU that replicas have been given.",
            "bytes",
            {"{{node}} GPU {{gpu}}": f"{_GPU_TOTAL} - {_GPU_FREE}"},
            is_stacked=True,
        ),
        Panel(
            "Share of GPU memory in use, by device",
            "Of the memory of each GPU that may be given to replicas.",
            "percentunit",
            {"{{node}} GPU {{gpu}}": f"1 - {share(_GPU_FREE, _GPU_TOTAL)}"},
            most=1,
        ),
    ],
    "Nodes": [
        Panel(
            "CPU memory for models in use, by node",
            "Memory that replicas on CPUs hold, and those that wait there for their GPU.",
            "bytes",
            {"{{node}}": f"{_CPU_TOTAL} - {_CPU_FREE}", "{{node}}, all": _CPU_TOTAL},
        ),
        Panel(
            "GPUs that are withdrawn",
            "1 for a GPU on which replicas failed, and which takes no models for an hour.",
            "short",
            {"{{node}} GPU {{gpu}}": state("ndif_gpu_withdrawn", _HERE, "node, gpu")},
            most=1,
        ),
    ],
}

SERVER: Rows = {
    "HTTP": [
        Panel(
            "Requests, by route",
            "The first part of their path.",
            "reqps",
            {"{{route}}": rate("ndif_http_requests_total", _HERE, "route")},
            is_stacked=True,
        ),
        Panel(
            "Answers, by status",
            "`unanswered`: the client left before.",
            "reqps",
            {"{{status}}": rate("ndif_http_requests_total", _HERE, "status")},
            is_stacked=True,
        ),
        Panel(
            "Time to answer, by route",
            "90 % of requests are answered within this time.",
            "s",
            {"{{route}}": quantile(0.9, "ndif_http_request_seconds", _HERE, "route")},
        ),
        Panel(
            "Share of 5xx",
            "503: a store is away, or nobody leads. 500: a defect, whose traceback `ndif logs api` has.",
            "percentunit",
            {"5xx": share(f"({_5XX} or vector(0))", rate("ndif_http_requests_total", _HERE))},
            most=1,
        ),
    ],
    "Channels, call-backs, retention": [
        Panel(
            "WebSockets that are open",
            "Live channels of clients: `/subscribe` of the newest, `/ws` of older ones.",
            "short",
            {"{{route}}": f"sum by (route) (ndif_websockets{{{_HERE}}})"},
            is_stacked=True,
        ),
        Panel(
            "Call-backs, by outcome",
            "Attempts to make one. `ndif callbacks list` shows those that were given up, and why.",
            "ops",
            {"{{outcome}}": rate("ndif_callbacks_total", _HERE, "outcome")},
            is_stacked=True,
        ),
        Panel(
            "Retention in an hour",
            "Stored objects that were deleted because their time was over.",
            "short",
            {"{{kind}}": f"sum by (kind) (increase(ndif_retention_deleted_total{{{_HERE}}}[1h]))"},
            is_stacked=True,
        ),
    ],
    "Hosts": [
        Panel(
            "Hosts that answer",
            "1 for a host whose metrics Prometheus gets.",
            "short",
            {"{{instance}}": f'up{{job="ndif", {_HERE}}}'},
            most=1,
        ),
        Panel(
            "Stores that answer",
            "1 for a store that answers a host.",
            "short",
            {"{{store}} to {{instance}}": f"ndif_store_up{{{_HERE}}}"},
            most=1,
        ),
        Panel(
            "Leader and problems",
            "1 while a process leads; and how many problems `ndif status` shows.",
            "short",
            {
                "leader": f"max (ndif_leader_up{{{_HERE}}})",
                "problems": f"max (ndif_problems{{{_HERE}}})",
            },
        ),
        Panel(
            "Free disk, by host",
            "Of the disk of results and large requests.",
            "bytes",
            {"{{instance}}": _DISK_FREE, "{{instance}}, all": _DISK_TOTAL},
        ),
    ],
}

DASHBOARDS: Mapping[str, Mapping[str, Any]] = {
    "overview.json": dashboard(
        "ndif-overview", "NDIF: overview", "Is the server well, and what does it do?", OVERVIEW
    ),
    "jobs.json": dashboard(
        "ndif-jobs", "NDIF: jobs", "Throughput, latency, queues, errors and sizes of jobs.", JOBS
    ),
    "models.json": dashboard(
        "ndif-models", "NDIF: models", "Replicas, loads, evictions, and memory of GPUs.", MODELS
    ),
    "server.json": dashboard(
        "ndif-server", "NDIF: server", "HTTP, live channels, call-backs, stores, hosts.", SERVER
    ),
}


def text_of(found: Mapping[str, Any]) -> str:
    """Return the text of a dashboard's file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, each in DASHBOARDS.items():
        (FOLDER / name).write_text(text_of(each))
