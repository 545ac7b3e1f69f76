"""Throughput, latency, queues, errors and sizes of jobs, of the measurements in InfluxDB."""

from __future__ import annotations

from deploy.grafana.make.influxdb.queries import (
    ACCEPTED,
    COMPLETED,
    EXECUTED,
    FAILED,
    LEFT_STATUS,
    QUEUED,
    count,
    over_time,
    quantile,
    quantiles,
    rate,
    sum_rate,
)
from deploy.grafana.make.panels import Panel, Rows, Stat

ROWS: Rows = {
    "In this time range": [
        Stat("Jobs accepted", "Of the chosen models.", "short", {"": count(ACCEPTED)}, nothing="0"),
        Stat(
            "Jobs completed", "Of the chosen models.", "short", {"": count(COMPLETED)}, nothing="0"
        ),
        Stat(
            "Jobs that failed",
            "Jobs whose block ran and ended with an error, the users' own included.",
            "short",
            {"": count(EXECUTED, FAILED)},
            nothing="0",
        ),
        Stat(
            "Time in the queue",
            "90 % of jobs leave QUEUED within this time.",
            "s",
            {"": quantile(90, LEFT_STATUS, QUEUED)},
        ),
        Stat(
            "Execution time",
            "90 % of blocks run for less than this time.",
            "s",
            {"": quantile(90, EXECUTED)},
        ),
    ],
    "Throughput": [
        Panel(
            "Jobs accepted and completed",
            "What is accepted and neither waits, runs nor completes has failed.",
            "suffix:jobs/s",
            {"accepted": rate(ACCEPTED), "completed": rate(COMPLETED)},
        ),
        Panel(
            "Jobs that ran, by status",
            "COMPLETED, or ERROR.",
            "suffix:jobs/s",
            {"$tag_status": rate(EXECUTED, "status")},
            is_stacked=True,
        ),
        Panel(
            "Jobs completed, by model",
            "Jobs that ended with a result.",
            "suffix:jobs/s",
            {"$tag_model": rate(COMPLETED, "model")},
            is_stacked=True,
        ),
    ],
    "Latency": [
        Panel("In the queue", "Time that jobs are QUEUED.", "s", quantiles(LEFT_STATUS, QUEUED)),
        Panel("Execution", "Time that a job's block runs.", "s", quantiles(EXECUTED)),
        Panel(
            "Time in each status",
            "90 % of jobs leave a status within this time.",
            "s",
            {"$tag_status": over_time(quantile(90, LEFT_STATUS), "status")},
        ),
    ],
    "Latency, by model": [
        Panel(
            "In the queue, by model",
            "90 % of a model's jobs leave QUEUED within this time.",
            "s",
            {"$tag_model": over_time(quantile(90, LEFT_STATUS, QUEUED), "model")},
        ),
        Panel(
            "Execution, by model",
            "90 % of a model's blocks run for less than this time.",
            "s",
            {"$tag_model": over_time(quantile(90, EXECUTED), "model")},
        ),
    ],
    "Queues": [
        Panel(
            "Jobs in each status",
            "Mean number. A job's time is counted when it leaves the status.",
            "short",
            {"$tag_status": sum_rate(LEFT_STATUS, "status")},
            is_stacked=True,
        ),
        Panel(
            "Jobs in the queue, by model",
            "Mean number. A job's time is counted when it leaves the queue.",
            "short",
            {"$tag_model": sum_rate(LEFT_STATUS, "model", where=QUEUED)},
            is_stacked=True,
        ),
        Panel(
            "Jobs that leave a status",
            "A queue grows while fewer jobs leave QUEUED than RECEIVED.",
            "suffix:jobs/s",
            {"$tag_status": rate(LEFT_STATUS, "status")},
        ),
    ],
    "Errors": [
        Panel(
            "Jobs that fail, by model",
            "Jobs whose block ran and ended with an error, the users' own included.",
            "suffix:jobs/s",
            {"$tag_model": rate(EXECUTED, "model", where=FAILED)},
            is_stacked=True,
        ),
        Panel(
            "Jobs that fail, by nnsight",
            "The same, by the generation of nnsight that ran them.",
            "suffix:jobs/s",
            {"$tag_generation": rate(EXECUTED, "generation", where=FAILED)},
            is_stacked=True,
        ),
    ],
    "Sizes": [
        Panel(
            "Size of requests",
            "90 % of payloads are smaller. The newest clients send envelopes, older ones headers.",
            "bytes",
            {"$tag_wire": over_time(quantile(90, ACCEPTED), "wire")},
        ),
        Panel(
            "Size of results",
            "90 % of a model's results are smaller.",
            "bytes",
            {"$tag_model": over_time(quantile(90, COMPLETED), "model")},
        ),
        Panel(
            "Traffic",
            "Bytes of requests and results, as they are sent or stored.",
            "Bps",
            {"requests": sum_rate(ACCEPTED), "results": sum_rate(COMPLETED)},
        ),
    ],
}
