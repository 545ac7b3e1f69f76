"""The daily digest: when it is due, and its text. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, time

from ndif.alerts.incidents import Incident
from ndif.alerts.messages import ABOUT, lasted
from ndif.config.units import format_duration
from ndif.schema.job_record import JobRecord
from ndif.sizes import format_size

DAY_S = 24 * 3600.0
MOST_JOBS = 10_000
"""Maximum number of job records that are read, so that a digest does not block a busy server."""
_TOP = 5


@dataclass(frozen=True, slots=True)
class Day:
    """The last day of a server."""

    at: float
    """Unix time of its end."""
    jobs: Sequence[JobRecord] | None
    """The jobs that ended last, the newest first; None if they cannot be read."""
    incidents: Sequence[Incident]
    leads_since: float
    """Unix time since which this process is the leader."""
    disk: tuple[int, int] | None
    """Free and total bytes of the disk of results; None if unknown."""


def is_due(now: datetime, at: time, last: str | None) -> bool:
    """Return True if today's digest must be sent; `last` is the mark of the last one's day."""
    return last is not None and last != day_of(now) and now.time() >= at


def day_of(now: datetime) -> str:
    """Return the date that marks a digest as sent."""
    return now.date().isoformat()


def first_mark(now: datetime, at: time) -> str:
    """Return the initial mark of a server without a digest; the next scheduled one is its first."""
    return day_of(now) if now.time() >= at else "none"


def lines(day: Day) -> list[str]:
    """Return the text of the digest, line by line."""
    return [*_jobs(day), *_incidents(day), *_machine(day)]


def _jobs(day: Day) -> list[str]:
    if day.jobs is None:
        return ["Jobs: the job records cannot be read."]
    ended = [job for job in day.jobs if day.at - job.ended < DAY_S]
    if not ended:
        return ["Jobs: none ended."]
    by_status = Counter(job.status for job in ended)
    statuses = ", ".join(f"{count} {status}" for status, count in by_status.most_common())
    only = " (only the most recent are counted)" if len(ended) >= MOST_JOBS else ""
    text = [f"Jobs: {len(ended)} ended{only}: {statuses}."]
    by_model: defaultdict[str, list[JobRecord]] = defaultdict(list)
    for job in ended:
        by_model[job.model].append(job)
    ranked = sorted(by_model.items(), key=lambda item: (-len(item[1]), item[0]))
    for model, jobs in ranked[:_TOP]:
        failed = sum(job.is_error for job in jobs)
        took = format_duration(sum(job.execution_s for job in jobs))
        text.append(f"• {model}: {len(jobs)} jobs, {failed} of them failed, {took} of execution")
    if len(ranked) > _TOP:
        text.append(f"• and {len(ranked) - _TOP} further models")
    waits: dict[str, float] = {}
    for job in ended:
        waits[job.model] = max(
            waits.get(job.model, 0.0), (job.dispatched or job.ended) - job.received
        )
    longest = sorted(waits.items(), key=lambda item: (-item[1], item[0]))[:_TOP]
    waiters = ", ".join(f"{lasted(wait)} ({model})" for model, wait in longest)
    return [*text, f"Longest waits: {waiters}."]


def _incidents(day: Day) -> list[str]:
    lately = [
        incident for incident in day.incidents if day.at - (incident.resolved or day.at) < DAY_S
    ]
    if not lately:
        return ["Incidents: none."]
    text = [f"Incidents: {len(lately)}."]
    for incident in sorted(lately, key=lambda incident: incident.opened)[-_TOP * 2 :]:
        took = lasted((incident.resolved or day.at) - incident.opened)
        state = f"over after {took}" if incident.resolved else f"open for {took}"
        subject = incident.members[0].cause.sentence
        text.append(f"• {ABOUT[incident.kind].title}, {state}: {subject}")
    return text


def _machine(day: Day) -> list[str]:
    text = [f"This process has been the leader for {lasted(day.at - day.leads_since)}."]
    if day.disk is not None:
        free, total = day.disk
        text.append(f"Disk of results: {format_size(free)} of {format_size(total)} free.")
    return text
