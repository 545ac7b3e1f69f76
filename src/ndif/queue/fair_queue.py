"""The order of one model's waiting requests. `FairQueue` decides; it never waits, and reads no clock.

Users share the model by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A user's turn starts
at a point of virtual time, the earliest start goes next, and taking an entry delays its user's next start
by cost / weight. An idle user's next turn starts at the current virtual time: idle time earns no credit.

A `priority` entry starts `head_start_s` earlier, but is charged like any other: the time is borrowed, as by
a warped thread of Duda and Cheriton (BVT scheduling, SOSP 1999). A user with few requests goes first; a
user who floods the queue uses up the head start. Ageing is counted in work done, not in seconds: while
nothing is taken, no entry is overtaken, and a reported position stays true as time passes.

Neither rule bounds the delay by an endless sequence of *new* users. `patience` does: the oldest entry is
taken once `patience - 1` others were taken since it became the oldest. So at most
(`patience` - 1) * (n + 1) later entries go before an entry that found n waiting. An entry given back counts
only when first taken.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

_LEAST_COST_S = 0.001
"""Least cost of an entry, in seconds: turns that cost nothing would never end."""
_FEW_ACCOUNTS = 1024


class Entry(Protocol):
    """One waiting request, with everything that decides its place in the queue."""

    @property
    def id(self) -> str:
        """Return its id."""

    @property
    def user(self) -> str:
        """Return the user, opaque."""

    @property
    def arrived(self) -> float:
        """Return the time of arrival in seconds; it orders entries that are given back."""

    @property
    def weight(self) -> float:
        """Return the share of the model relative to other users, from the tier of the API key."""

    @property
    def priority(self) -> bool:
        """Return True if it goes before its user's other entries, and gets the head start."""

    @property
    def cost(self) -> float:
        """Return the estimated run time in seconds, which stays the same while it waits and runs."""


T = TypeVar("T", bound=Entry)


def _charge(entry: Entry, ran_s: float | None = None) -> float:
    """Return the virtual time that an entry takes, by its estimate or by its measured run time."""
    return max(entry.cost if ran_s is None else ran_s, _LEAST_COST_S) / entry.weight


@dataclass(eq=False, slots=True)
class _Account(Generic[T]):
    """The waiting entries of one user, and the virtual time at which the user's next turn starts."""

    start: float = 0.0
    priority: OrderedDict[str, T] = field(default_factory=OrderedDict)
    ordinary: OrderedDict[str, T] = field(default_factory=OrderedDict)
    turn: _Turn[T] | None = None
    """The turn in the heap that counts for this account; None while nothing waits."""

    def entries_beside(self, entry: T) -> OrderedDict[str, T]:
        """Return the entries of this user that an entry waits among."""
        return self.priority if entry.priority else self.ordinary


_Turn = tuple[float, int, _Account[T]]
"""Effective start, a number that breaks ties in the order turns were given, and the account."""


class _Reader(Generic[T]):
    """A walk through the entries of one account, which leaves the account as it is."""

    __slots__ = ("_remaining", "ordinary", "priority", "start", "turn")

    def __init__(self, account: _Account[T]) -> None:
        self.start, self.turn = account.start, account.turn
        self._remaining = iter(account.ordinary.values()), iter(account.priority.values())
        self.ordinary, self.priority = (next(entries, None) for entries in self._remaining)

    def pass_by(self, entry: T) -> None:
        """Step past an entry as if it had been taken."""
        self.start += _charge(entry)
        following = next(self._remaining[entry.priority], None)
        if entry.priority:
            self.priority = following
        else:
            self.ordinary = following


class FairQueue(Generic[T]):
    """The waiting requests of one model, in the order of fair scheduling between users.

    Entries of one user go in the order they came, `priority` entries before ordinary ones.
    """

    def __init__(self, head_start_s: float = 60.0, patience: int = 32) -> None:
        if not 0 <= head_start_s < math.inf or patience < 1:
            raise ValueError("a head start must be at least 0 and finite, patience at least 1")
        self.head_start_s = head_start_s
        """Seconds of work, by weight, that a user's `priority` entries may take before others."""
        self.patience = patience
        """Number of consecutive takes that include at least one of the oldest entry."""
        self._waiting: OrderedDict[str, T] = OrderedDict()
        self._returned: list[T] = []
        self._accounts: dict[str, _Account[T]] = {}
        self._many_accounts = _FEW_ACCOUNTS
        # A turn that its account has replaced stays in the heap until it comes to the top.
        self._heap: list[_Turn[T]] = []
        self._ticks = 0
        self._virtual = 0.0
        self._overtaken = 0  # takes of others since the oldest entry became the oldest

    def add(self, entry: T) -> None:
        """Add an entry; its weight and its cost must be finite."""
        self._raise_if_present(entry)
        # A single NaN or infinite turn would disorder all turns.
        if not 0 < entry.weight < math.inf:
            raise ValueError(f"a weight must be more than 0 and finite, not {entry.weight}")
        if not 0 <= entry.cost < math.inf:
            raise ValueError(f"a cost must be at least 0 and finite, not {entry.cost}")
        self._forget_idle_accounts()
        account = self._accounts.setdefault(entry.user, _Account())
        if account.turn is None:
            account.start = max(account.start, self._virtual)
        urgent = bool(account.priority)
        self._waiting[entry.id] = account.entries_beside(entry)[entry.id] = entry
        if account.turn is None or urgent != bool(account.priority):
            self._replace_turn(account)

    def give_back(self, entry: T) -> None:
        """Put a taken entry back at the very head, uncharged; several go in the order they arrived."""
        self._raise_if_present(entry)
        insort(self._returned, entry, key=lambda other: other.arrived)

    def take(self) -> T | None:
        """Remove and return the first entry in the order of `positions`; None if nothing waits."""
        entry = next(self.order(), None)
        if entry is None:
            return None
        if entry.id in self._waiting:
            self._charge_and_drop(entry)
        else:
            self._returned.remove(entry)
        return entry

    def reset(self) -> None:
        """Let all users of an empty queue start equal again; raise ValueError if an entry waits.

        An empty queue means an idle replica, so earlier use by one user must delay no other user.
        """
        if self:
            raise ValueError("a queue in which entries wait cannot be reset")
        self._accounts.clear()
        self._heap.clear()

    def settle(self, entry: T, ran_s: float) -> None:
        """Charge the user of a taken entry for the seconds that the request ran instead of the estimate."""
        account = self._accounts.get(entry.user)
        if account is None:
            return  # the queue was reset since
        account.start += _charge(entry, ran_s) - _charge(entry)
        if account.turn is not None:
            self._replace_turn(account)

    def remove(self, entry_id: str) -> T | None:
        """Remove and return an entry, uncharged; None if it does not wait here."""
        entry = self.find(entry_id)
        if entry is None:
            return None
        if entry_id not in self._waiting:
            self._returned.remove(entry)
            return entry
        account = self._accounts[entry.user]
        urgent = bool(account.priority)
        self._drop(entry)
        if urgent != bool(account.priority) or not (account.priority or account.ordinary):
            self._replace_turn(account)
        return entry

    def remove_all(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove every entry that `matches`, uncharged, and return the removed entries."""
        removed = [entry for entry in self if matches(entry)]
        for entry in removed:
            self.remove(entry.id)
        return removed

    def find(self, entry_id: str) -> T | None:
        """Return an entry; None if it does not wait here."""
        entry = self._waiting.get(entry_id)
        return entry or next((other for other in self._returned if other.id == entry_id), None)

    def positions(self) -> list[tuple[T, int]]:
        """Return every entry and its position from 1, in the order of service if nothing else comes."""
        return [(entry, place) for place, entry in enumerate(self.order(), start=1)]

    def position(self, entry_id: str, within: int = 64) -> int | None:
        """Return an entry's position if that is at most `within`: cheaper than `positions`."""
        first = enumerate(islice(self.order(), within), start=1)
        return next((place for place, entry in first if entry.id == entry_id), None)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._returned)

    def __iter__(self) -> Iterator[T]:
        """Iterate over entries that were given back, then over the others in the order they came."""
        return chain(self._returned, self._waiting.values())

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._waiting or any(entry.id == entry_id for entry in self._returned)

    def order(self) -> Iterator[T]:
        """Iterate over entries in the order of service, which is decided nowhere else."""
        yield from self._returned
        while self._heap and self._heap[0] is not self._heap[0][2].turn:
            heappop(self._heap)
        turns, ticks, overtaken = self._heap.copy(), self._ticks, self._overtaken
        readers: dict[_Account[T], _Reader[T]] = {}
        yielded: set[str] = set()
        by_age = iter(self._waiting.values())
        oldest = next(by_age, None)
        while oldest is not None:
            due = overtaken + 1 >= self.patience
            account = self._accounts[oldest.user] if due else turns[0][2]
            reader = readers.get(account) or readers.setdefault(account, _Reader(account))
            if not due and turns[0] is not reader.turn:
                heappop(turns)
                continue
            # An account with a turn has an entry that waits; the last `oldest` is for the type alone.
            entry = oldest if due else reader.priority or reader.ordinary or oldest
            yield entry
            yielded.add(entry.id)
            overtaken += 1
            while oldest is not None and oldest.id in yielded:
                oldest, overtaken = next(by_age, None), 0
            reader.pass_by(entry)
            reader.turn = None
            if reader.priority or reader.ordinary:
                ticks += 1
                reader.turn = (self._effective(reader), ticks, account)
                heappush(turns, reader.turn)

    def _effective(self, account: _Account[T] | _Reader[T]) -> float:
        """Return when a user's turn starts, with the head start of a `priority` entry."""
        return account.start - self.head_start_s if account.priority else account.start

    def _replace_turn(self, account: _Account[T]) -> None:
        """Replace the turn of an account by the one that follows from its entries."""
        account.turn = None
        if not account.priority and not account.ordinary:
            return
        self._ticks += 1
        account.turn = (self._effective(account), self._ticks, account)
        heappush(self._heap, account.turn)
        if len(self._heap) > 2 * len(self._accounts) + _FEW_ACCOUNTS:
            self._heap = [turn for turn in self._heap if turn is turn[2].turn]
            heapify(self._heap)

    def _charge_and_drop(self, entry: T) -> None:
        account = self._accounts[entry.user]
        oldest = entry.id == next(iter(self._waiting))
        if account.turn is not None and not (oldest and self._overtaken + 1 >= self.patience):
            # New users start where this turn did. A turn that was due by age does not count: its user
            # may be far ahead of the others.
            self._virtual = max(self._virtual, account.turn[0])
        self._overtaken += 1
        account.start += _charge(entry)
        self._drop(entry)
        self._replace_turn(account)

    def _drop(self, entry: T) -> None:
        if entry.id == next(iter(self._waiting)):
            self._overtaken = 0
        del self._waiting[entry.id], self._accounts[entry.user].entries_beside(entry)[entry.id]

    def _raise_if_present(self, entry: T) -> None:
        if entry.id in self:
            raise ValueError(f"{entry.id!r} is in the queue already")

    def _forget_idle_accounts(self) -> None:
        """Drop accounts without debt, each time the number of accounts has doubled."""
        if len(self._accounts) < self._many_accounts:
            return
        for user, account in list(self._accounts.items()):
            if account.turn is None and account.start <= self._virtual:
                del self._accounts[user]
        self._many_accounts = max(_FEW_ACCOUNTS, 2 * len(self._accounts))
