"""Usage: the ended jobs, and their sums by user, model and day."""

from __future__ import annotations

from ndif.config.settings import Settings
from ndif.stores.accounts import database_url
from ndif.stores.accounts.choice import default_file
from ndif.stores.usage.history import Interval as Interval
from ndif.stores.usage.history import percentile as percentile
from ndif.stores.usage.journal import JournaledUsage as JournaledUsage
from ndif.stores.usage.memory import MemoryUsage as MemoryUsage
from ndif.stores.usage.port import Group as Group
from ndif.stores.usage.port import UsageStore as UsageStore
from ndif.stores.usage.port import UsageTotal as UsageTotal
from ndif.stores.usage.port import UsageUnavailableError as UsageUnavailableError


def open_usage(settings: Settings) -> UsageStore:
    """Return the record of jobs beside the API keys, else in the SQLite file of this machine."""
    urls = dict.fromkeys(
        filter(None, (database_url(settings), f"sqlite:///{default_file(settings)}"))
    )
    return JournaledUsage(
        [*urls], settings.root / "usage", max(settings.response_ttl_s, settings.result_ttl_s)
    )
