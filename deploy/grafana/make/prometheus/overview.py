"""The state of a server, and its jobs, on one page."""

from __future__ import annotations

from deploy.grafana.make.panels import GREEN, RED, YELLOW, AlertList, Panel, Rows, Stat
from deploy.grafana.make.prometheus.jobs import BY_STATUS, FAILING, WAITING
from deploy.grafana.make.prometheus.queries import DISK_FREE, DISK_TOTAL, HERE, share, state, total

_ZERO_IS_BAD = ((None, RED), (1, GREEN))
_ANY_IS_BAD = ((None, GREEN), (1, RED))

ROWS: Rows = {
    "Now": [
        Stat(
            "Leader",
            "Without a process that leads, jobs are accepted and none runs: `ndif logs dispatcher`.",
            "none",
            {"": f"max (ndif_leader_up{{{HERE}}})"},
            steps=_ZERO_IS_BAD,
            words={"0": "nobody leads", "1": "leads"},
        ),
        Stat(
            "Stores that are away",
            "Broker, object store or accounts, as the host sees it that sees the fewest.",
            "short",
            {"": f"sum (1 - min by (store) (ndif_store_up{{{HERE}}}))"},
            steps=_ANY_IS_BAD,
        ),
        Stat(
            "Problems",
            "`ndif status` has a sentence for each.",
            "short",
            {"": f"max (ndif_problems{{{HERE}}})"},
            steps=((None, GREEN), (1, YELLOW)),
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
            {"": f"sum ({state('ndif_gpu_withdrawn', HERE, 'node, gpu')})"},
            steps=((None, GREEN), (1, YELLOW)),
        ),
        Stat(
            "Free disk",
            "Of the host that has the least, for results and large requests.",
            "percentunit",
            {"": f"min ({share(DISK_FREE, DISK_TOTAL)})"},
            steps=((None, RED), (0.05, YELLOW), (0.15, GREEN)),
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
        BY_STATUS,
        WAITING,
        FAILING,
    ],
}
