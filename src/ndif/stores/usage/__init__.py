"""Usage: the jobs that have ended, and what each user, model and day adds up to."""

from ndif.stores.usage.memory import MemoryUsage as MemoryUsage
from ndif.stores.usage.port import GROUPS as GROUPS
from ndif.stores.usage.port import Group as Group
from ndif.stores.usage.port import Total as Total
from ndif.stores.usage.port import UsageAwayError as UsageAwayError
from ndif.stores.usage.port import UsageStore as UsageStore
