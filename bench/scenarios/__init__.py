"""The scenarios: each a module whose `measure` gives figures (`bench.scenario.Scenario`)."""

QUICK = (
    "control",
    "small_trace",
    "jobs",
    "every_layer",
    "large_results",
    "memory",
    "replicas",
    "cold_start",
    "warm",
    "no_op",
    "accounts",
    "telemetry",
    "usage",
    "fair_queue",
    "placement",
    "commands",
)
"""Scenarios of `make bench`, in ten minutes."""

FULL = (
    "many_machines",
    "queue",
    "cluster",
    "hostile",
    "dashboard",
    "simulate",
    "series",
    "swapping",
)
"""Scenarios that `make bench-full` adds."""
