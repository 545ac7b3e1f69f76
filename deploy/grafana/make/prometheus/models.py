"""Replicas, loads, evictions, and memory of GPUs."""

from __future__ import annotations

from deploy.grafana.make.panels import Panel, Rows
from deploy.grafana.make.prometheus.queries import (
    HERE,
    OF_MODEL,
    free_and_total,
    model_state,
    quantile,
    rate,
    share,
    state,
)

_GPU_FREE, _GPU_TOTAL = free_and_total("ndif_gpu_memory_bytes", HERE, "node, gpu")
_CPU_FREE, _CPU_TOTAL = free_and_total("ndif_cpu_memory_bytes", HERE, "node")

ROWS: Rows = {
    "Probes": [
        Panel(
            "Models that answer their probe",
            "1 if the last trace that the server sent itself got the right value; 0 if it did not.",
            "short",
            {
                "{{model}}, nnsight {{generation}}": state(
                    "ndif_probe_up", OF_MODEL, "model, generation"
                )
            },
            most=1,
        ),
        Panel(
            "Time of probes, by model",
            "90 % of them have their value within this time, including the wait in the queue.",
            "s",
            {"{{model}}": quantile(0.9, "ndif_probe_seconds", OF_MODEL, "model")},
        ),
        Panel(
            "Probes, by outcome",
            "Probes of the last hour. loading: the model was being loaded, which is no failure.",
            "short",
            {"{{outcome}}": f"sum by (outcome) (increase(ndif_probes_total{{{OF_MODEL}}}[1h]))"},
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
                f"({state('ndif_replicas', OF_MODEL, 'model, generation, state')})"
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
            {"from {{source}}": quantile(0.9, "ndif_model_load_seconds", OF_MODEL, "source")},
        ),
        Panel(
            "Load time, by model",
            "Mean time to start a replica.",
            "s",
            {
                "{{model}} from {{source}}": share(
                    rate("ndif_model_load_seconds_sum", OF_MODEL, "model, source"),
                    f"({rate('ndif_model_load_seconds_count', OF_MODEL, 'model, source')} > 0)",
                )
            },
        ),
        Panel(
            "Loads in an hour",
            "Replicas that came up, by where they came from.",
            "short",
            {
                "from {{source}}": "sum by (source) "
                f"(increase(ndif_model_load_seconds_count{{{OF_MODEL}}}[1h]))"
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
                f"(increase(ndif_evictions_total{{{OF_MODEL}}}[1h]))"
            },
            is_stacked=True,
        ),
        Panel(
            "Loads that failed",
            "Since the server was started; `ndif status` says why.",
            "short",
            {"{{model}}": f"sum by (model) (ndif_model_load_failures_total{{{OF_MODEL}}})"},
        ),
        Panel(
            "Replicas that were lost",
            "Since the server was started: their process ended by itself, or with its node.",
            "short",
            {"{{model}}": f"sum by (model) (ndif_replicas_lost_total{{{OF_MODEL}}})"},
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
            {"{{node}} GPU {{gpu}}": state("ndif_gpu_withdrawn", HERE, "node, gpu")},
            most=1,
        ),
    ],
}
