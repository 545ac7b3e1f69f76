"""The scenarios: modules whose `measure` yields figures (`bench.scenario.Scenario`)."""

QUICK = (
    "small_trace",
    "jobs",
    "every_layer",
    "large_results",
    "memory",
    "replicas",
    "cold_start",
    "no_op",
    "fair_queue",
    "placement",
)
"""Scenarios of `make bench`, which takes ten minutes."""

FULL = (
    "many_machines",
    "warm",
    "concurrency",
    "commands",
    "co_batch",
    "control",
    "accounts",
    "telemetry",
    "usage",
    "queue",
    "cluster",
    "hostile",
    "misbehaving",
    "dashboard",
    "simulate",
    "series",
    "swapping",
)
"""Scenarios that `make bench-full` adds."""
