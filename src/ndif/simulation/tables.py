"""A simulation's report as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ndif.config.units import format_duration

_BARS = " ▁▂▃▄▅▆▇█"


def show(report: Mapping[str, Any], console: Console, limit: int) -> None:
    """Print a report, with at most `limit` models and nodes."""
    trace, overall = report["trace"], report["overall"]
    console.print(
        f"[bold]{trace['requests']:,}[/] requests of {trace['users']:,} users for {trace['models']:,} "
        f"models in {format_duration(trace['last_arrival_s'])}; ended after "
        f"{format_duration(trace['ended_s'])}."
    )
    console.print(
        f"{overall['completed']:,} completed, {overall['refused']:,} refused, {overall['failed']:,} "
        f"failed, {overall['unfinished']:,} unfinished; {overall['on_cpu']:,} ran without GPUs. "
        f"{overall['interrupted']:,} times a request lost its replica and waited for another replica."
    )
    tables = [
        _rows(report["models"], "model", limit),
        _rows(report["nodes"], "node", limit),
        _totals(report),
    ]
    if report["errors"]:
        errors = Table("requests", title="Refused and failed", title_justify="left")
        errors.add_column("for example", overflow="fold")
        for error in report["errors"]:
            errors.add_row(f"{error['requests']:,}", escape(error["for_example"]))
        tables.append(errors)
    for table in tables:
        console.print()
        console.print(table)


def _rows(rows: Sequence[Mapping[str, Any]], kind: str, limit: int) -> Table:
    """Return a table of models with their requests, or of nodes with their GPUs."""
    are_models = kind == "model"
    title = f"The first {limit} {kind}s, of {len(rows)}"
    table = Table(title=title if len(rows) > limit else None, title_justify="left")
    table.add_column(kind, overflow="fold", min_width=12)
    headings = ["requests", "errors", "p50", "p90", "p99", "most"] if are_models else ["gpus"]
    for heading in (*headings, "cold", "warm", "evicted", "busy", "held"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(
            escape(row[kind]) + (f" [dim]{row['generation']}[/]" if are_models else ""),
            *(_requests(row) if are_models else [f"{row['gpus']}"]),
            f"{row['cold_loads']:,}",
            f"{row['warm_returns']:,}",
            f"{row['evicted_to_warm'] + row['evicted_to_cold']:,}",
            _percent(row["gpu_utilisation"]),
            _percent(row["gpus_held"]),
        )
    return table


def _requests(row: Mapping[str, Any]) -> list[str]:
    errors = row["refused"] + row["failed"] + row["unfinished"]
    waits = row["wait_s"] or {}
    levels = (format_duration(waits.get(level)) for level in ("p50", "p90", "p99", "max"))
    return [f"{row['requests']:,}", f"{errors:,}" if errors else "-", *levels]


def _totals(report: Mapping[str, Any]) -> Table:
    overall, hours = report["overall"], report["hours"]
    table = Table(title="Total", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, label in (("wait_s", "waits"), ("run_s", "run times")):
        quantiles = overall[name]
        if quantiles:
            text = ", ".join(
                f"{level} {format_duration(seconds)}" for level, seconds in quantiles.items()
            )
            table.add_row(label, text)
    table.add_row(
        "loads", f"{overall['cold_loads']:,} cold, {overall['warm_returns']:,} warm returns"
    )
    table.add_row(
        "evictions",
        f"{overall['evicted_to_warm']:,} to WARM, {overall['evicted_to_cold']:,} to COLD; "
        f"{overall['dropped_from_warm']:,} WARM replicas dropped",
    )
    requests = [hour["requests"] for hour in hours]
    table.add_row("requests", f"{_bars(requests)}  by the hour, at most {max(requests):,}")
    for name, label in (
        ("gpu_utilisation", "GPUs busy"),
        ("gpus_held", "GPUs held"),
        ("cpu_memory_held", "CPU memory held"),
    ):
        if overall[name] is not None:
            parts = [hour[name] or 0.0 for hour in hours]
            text = f"{_percent(overall[name])}, in an hour at most {_percent(max(parts))}"
            table.add_row(label, f"{_bars(parts)}  {text}")
    return table


def _bars(values: list[float]) -> str:
    largest = max(values) or 1.0
    return "".join(_BARS[round(value / largest * (len(_BARS) - 1))] for value in values)


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
