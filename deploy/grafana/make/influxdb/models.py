"""Peak memory, loads and use of models, of the measurements in InfluxDB."""

from __future__ import annotations

from deploy.grafana.make.influxdb.queries import (
    ACCEPTED,
    EXECUTED,
    LOADED,
    PEAK_MEMORY,
    PROBE_VALUES,
    PROBED,
    count,
    greatest,
    hourly,
    mean,
    over_time,
    quantile,
    quantiles,
    rate,
    sum_rate,
)
from deploy.grafana.make.panels import Panel, Rows, Stat

ROWS: Rows = {
    "Probes": [
        Panel(
            "Models that answer their probe",
            "1 where each trace that the server sent itself got the right value; 0 where none did.",
            "short",
            {"$tag_model, nnsight $tag_generation": mean(PROBED, "model", "generation")},
            most=1,
        ),
        Panel(
            "Time of probes, by model",
            "90 % of them have their value within this time, including the wait in the queue.",
            "s",
            {"$tag_model": over_time(quantile(90, PROBE_VALUES), "model")},
        ),
        Panel(
            "Probes, by outcome",
            "Probes of each hour. loading: the model was being loaded, which is no failure.",
            "short",
            {"$tag_outcome": hourly(count(PROBED), "outcome")},
            is_stacked=True,
        ),
    ],
    "In this time range": [
        Stat(
            "Greatest peak memory",
            "Of a job, beside its model: of the GPU or of its process.",
            "bytes",
            {"": greatest(PEAK_MEMORY)},
        ),
        Stat("Replicas loaded", "Of the chosen models.", "short", {"": count(LOADED)}, nothing="0"),
        Stat("Longest load", "Of a replica that came up.", "s", {"": greatest(LOADED)}),
    ],
    "Peak memory of jobs": [
        Panel(
            "Peak memory",
            "Memory that jobs take beside their model, of the GPU or of their process.",
            "bytes",
            quantiles(PEAK_MEMORY),
        ),
        Panel(
            "Peak memory, by model",
            "90 % of a model's jobs take less.",
            "bytes",
            {"$tag_model": over_time(quantile(90, PEAK_MEMORY), "model")},
        ),
        Panel(
            "Greatest peak memory, by model",
            "What the GPU needs beside the model, lest a job runs out of memory.",
            "bytes",
            {"$tag_model": over_time(greatest(PEAK_MEMORY), "model")},
        ),
    ],
    "Loads": [
        Panel(
            "Load time, by source",
            "90 % of replicas come up within this time: from the disk, or from the CPU's memory.",
            "s",
            {"from $tag_source": over_time(quantile(90, LOADED), "source")},
        ),
        Panel(
            "Load time, by model",
            "Mean time to start a replica.",
            "s",
            {"$tag_model from $tag_source": mean(LOADED, "model", "source")},
        ),
        Panel(
            "Loads in each hour",
            "Replicas that came up. A model that is often loaded was often displaced.",
            "short",
            {"$tag_model from $tag_source": hourly(count(LOADED), "model", "source")},
            is_stacked=True,
        ),
    ],
    "Use": [
        Panel(
            "Jobs that run, by model",
            "Mean number of replicas that are busy. A job's time is counted when it ends.",
            "short",
            {"$tag_model": sum_rate(EXECUTED, "model")},
            is_stacked=True,
        ),
        Panel(
            "Jobs accepted, by model",
            "Jobs that clients sent, whatever their end.",
            "suffix:jobs/s",
            {"$tag_model": rate(ACCEPTED, "model")},
            is_stacked=True,
        ),
        Panel(
            "Jobs accepted, by nnsight",
            "The generation of nnsight that runs them.",
            "suffix:jobs/s",
            {"$tag_generation": rate(ACCEPTED, "generation")},
            is_stacked=True,
        ),
    ],
}
