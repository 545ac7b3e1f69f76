"""HTTP, live channels, webhooks and mails, stores, hosts."""

from __future__ import annotations

from deploy.grafana.make.panels import Panel, Rows
from deploy.grafana.make.prometheus.queries import (
    DISK_FREE,
    DISK_TOTAL,
    HERE,
    quantile,
    rate,
    share,
)

_5XX = rate("ndif_http_requests_total", f'{HERE}, status=~"5.."')

ROWS: Rows = {
    "HTTP": [
        Panel(
            "Requests, by route",
            "The first part of their path.",
            "reqps",
            {"{{route}}": rate("ndif_http_requests_total", HERE, "route")},
            is_stacked=True,
        ),
        Panel(
            "Answers, by status",
            "`unanswered`: the client left before.",
            "reqps",
            {"{{status}}": rate("ndif_http_requests_total", HERE, "status")},
            is_stacked=True,
        ),
        Panel(
            "Time to answer, by route",
            "90 % of requests are answered within this time.",
            "s",
            {"{{route}}": quantile(0.9, "ndif_http_request_seconds", HERE, "route")},
        ),
        Panel(
            "Share of 5xx",
            "503: a store is away, or nobody leads. 500: a defect, whose traceback `ndif logs api` has.",
            "percentunit",
            {"5xx": share(f"({_5XX} or vector(0))", rate("ndif_http_requests_total", HERE))},
            most=1,
        ),
    ],
    "Channels, webhooks and mails, retention, telemetry": [
        Panel(
            "WebSockets that are open",
            "Live channels of clients: `/subscribe` of the newest, `/ws` of older ones.",
            "short",
            {"{{route}}": f"sum by (route) (ndif_websockets{{{HERE}}})"},
            is_stacked=True,
        ),
        Panel(
            "Webhooks and mails, by outcome",
            "Attempts to deliver a webhook or mail. `ndif callbacks list` shows given-up ones, and why.",
            "ops",
            {"{{outcome}}": rate("ndif_callbacks_total", HERE, "outcome")},
            is_stacked=True,
        ),
        Panel(
            "Retention in an hour",
            "Stored objects that expired and were deleted.",
            "short",
            {"{{kind}}": f"sum by (kind) (increase(ndif_retention_deleted_total{{{HERE}}}[1h]))"},
            is_stacked=True,
        ),
        Panel(
            "Telemetry lost in an hour",
            "Measurements, log lines and traces that did not reach InfluxDB, Loki or OTLP.",
            "short",
            {"lost": f"sum (increase(ndif_telemetry_lost_total{{{HERE}}}[1h])) or vector(0)"},
        ),
    ],
    "Hosts": [
        Panel(
            "Hosts that answer",
            "1 for a host whose metrics Prometheus gets.",
            "short",
            {"{{instance}}": f'up{{job="ndif", {HERE}}}'},
            most=1,
        ),
        Panel(
            "Stores that answer",
            "1 for a store that answers a host.",
            "short",
            {"{{store}} to {{instance}}": f"ndif_store_up{{{HERE}}}"},
            most=1,
        ),
        Panel(
            "Leader and problems",
            "1 while the server has a leader; and the number of problems that `ndif status` shows.",
            "short",
            {
                "leader": f"max (ndif_leader_up{{{HERE}}})",
                "problems": f"max (ndif_problems{{{HERE}}})",
            },
        ),
        Panel(
            "Free disk, by host",
            "Of the disk of results and large requests.",
            "bytes",
            {"{{instance}}": DISK_FREE, "{{instance}}, all": DISK_TOTAL},
        ),
    ],
}
