"""Throughput, latency, queues, errors and sizes of jobs."""

from __future__ import annotations

from deploy.grafana.make.panels import Panel, Rows
from deploy.grafana.make.prometheus.queries import (
    HERE,
    OF_MODEL,
    model_state,
    quantile,
    quantiles,
    rate,
    share,
)

_FAILED = rate("ndif_jobs_total", f'{OF_MODEL}, status!~"COMPLETED|CANCELLED"', "model")
_ENDED = rate("ndif_jobs_total", OF_MODEL, "model")
_ACCEPTED = rate("ndif_submitted_bytes_count", HERE)

BY_STATUS = Panel(
    "Jobs that end, by status",
    "COMPLETED, ERROR, CANCELLED, or ENDED where the process that ran it was gone.",
    "suffix:jobs/s",
    {"{{status}}": rate("ndif_jobs_total", OF_MODEL, "status")},
    is_stacked=True,
)
WAITING = Panel(
    "Waiting",
    "From the receipt of a job to its dispatch to a replica.",
    "s",
    quantiles("ndif_job_wait_seconds", OF_MODEL),
)
FAILING = Panel(
    "Share of jobs that fail, by model",
    "Jobs that end with an error, the users' own included, of all that end.",
    "percentunit",
    {"{{model}}": share(_FAILED, _ENDED)},
    most=1,
)

ROWS: Rows = {
    "Throughput": [
        BY_STATUS,
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
            {"{{model}}": rate("ndif_job_result_bytes_sum", OF_MODEL, "model")},
            is_stacked=True,
        ),
        Panel(
            "Jobs that share a forward pass",
            "Of those that end, where NDIF_CO_BATCH lets several run together.",
            "suffix:jobs/s",
            {"{{model}}": rate("ndif_jobs_shared_total", OF_MODEL, "model")},
            is_stacked=True,
        ),
    ],
    "Latency": [
        WAITING,
        Panel(
            "Execution",
            "Time that a job's block runs.",
            "s",
            quantiles("ndif_job_execution_seconds", OF_MODEL),
        ),
        Panel(
            "Time in each status",
            "90 % of jobs leave a status within this time.",
            "s",
            {"{{status}}": quantile(0.9, "ndif_job_status_seconds", HERE, "status")},
        ),
    ],
    "Latency, by model": [
        Panel(
            "Waiting, by model",
            "90 % of a model's jobs are dispatched within this time.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_job_wait_seconds", OF_MODEL, "model")},
        ),
        Panel(
            "Execution, by model",
            "90 % of a model's blocks run for less than this time.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_job_execution_seconds", OF_MODEL, "model")},
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
            "Jobs on replicas, each of which runs one, or several in one forward pass.",
            "short",
            {"{{model}}": model_state("ndif_jobs_running")},
            is_stacked=True,
        ),
        Panel(
            "Processing rate",
            "Queues grow while more jobs are accepted than end.",
            "suffix:jobs/s",
            {"accepted": _ACCEPTED, "ended": rate("ndif_jobs_total", HERE)},
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
        FAILING,
        Panel(
            "Refusals, by reason",
            "Jobs that were not accepted. broker, disk, store, accounts, unavailable and failure are the "
            "server's own reasons.",
            "suffix:jobs/s",
            {"{{reason}}": rate("ndif_refusals_total", HERE, "reason")},
            is_stacked=True,
        ),
    ],
    "Steps and limits": [
        Panel(
            "Time of each step",
            "90 % of the steps of jobs take less. acquire is the wait for a runner, send the way of the "
            "payload to it; execute is the block.",
            "s",
            {"{{by}}: {{step}}": quantile(0.9, "ndif_job_step_seconds", HERE, "by, step")},
        ),
        Panel(
            "Runs that were ended, by limit",
            "Blocks that took too much time, memory or threads, printed or streamed too much, or whose "
            "process crashed.",
            "suffix:jobs/s",
            {"{{limit}}": rate("ndif_runner_kills_total", HERE, "limit")},
            is_stacked=True,
        ),
    ],
    "Sizes": [
        Panel(
            "Size of requests",
            "90 % of payloads are smaller. The newest clients send envelopes, older ones headers.",
            "bytes",
            {"{{wire}}": quantile(0.9, "ndif_submitted_bytes", HERE, "wire")},
        ),
        Panel(
            "Size of results",
            "90 % of a model's results are smaller.",
            "bytes",
            {"{{model}}": quantile(0.9, "ndif_job_result_bytes", OF_MODEL, "model")},
        ),
        Panel(
            "Peak memory of jobs",
            "90 % of a model's jobs take less beside the model, of the GPU or of their process.",
            "bytes",
            {"{{model}}": quantile(0.9, "ndif_job_peak_memory_bytes", OF_MODEL, "model")},
        ),
    ],
}
