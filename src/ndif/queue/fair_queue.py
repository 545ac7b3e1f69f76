"""Line: which of a model's waiting requests goes next. It decides; it never waits, and knows no clock.

Users share the model by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A user's turn
starts at a point of virtual time, the earliest start goes next, and what is taken moves its user's next
start back by cost / weight. Whoever comes from idleness starts now, so nobody saves turns up.

A `priority` entry starts `head_start_s` earlier, but is charged like any other: time that is borrowed, as
by a warped thread of Duda and Cheriton (BVT scheduling, SOSP 1999). Who has few goes first; who floods
uses the head start up and is back among the others. Ageing is counted in work done, not in seconds on a
clock: while nothing is taken nobody is overtaken, and a position that was told stays true as time passes.

Neither bounds what endless *new* users can do. `patience` does: an entry that has waited longest, and sees
`patience - 1` others taken since it has, is taken next. `Line.overtaken_at_most` is what follows from that.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, islice
from typing import Generic, TypeVar

T = TypeVar("T")

_LEAST_COST_S = 0.001
"""What any entry costs at least: turns that cost nothing would never end."""
_FEW_ACCOUNTS = 1024


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One request that waits, as far as its turn depends on it."""

    id: str
    user: str
    """Whose it is; opaque."""
    what: T
    arrived: float
    """Seconds; orders what is given back."""
    weight: float = 1.0
    """Share of the model beside other users; the key's tier says it."""
    priority: bool = False
    cost: float = 1.0
    """Estimated run time in seconds."""

    def __post_init__(self) -> None:
        # Neither may be NaN or infinite: one such turn would disorder everybody's.
        if not 0 < self.weight < math.inf:
            raise ValueError(f"a weight must be more than 0 and finite, not {self.weight}")
        if not 0 <= self.cost < math.inf:
            raise ValueError(f"a cost must be at least 0 and finite, not {self.cost}")


def _charge(entry: Entry[T], ran_s: float | None = None) -> float:
    """Virtual time that an entry takes, by its estimate or by what was measured."""
    return max(entry.cost if ran_s is None else ran_s, _LEAST_COST_S) / entry.weight


class _Account(Generic[T]):
    """What one user has waiting, and the virtual time at which their next turn starts."""

    __slots__ = ("ordinary", "priority", "start", "turn")

    def __init__(self) -> None:
        self.start = 0.0
        self.priority: OrderedDict[str, Entry[T]] = OrderedDict()
        self.ordinary: OrderedDict[str, Entry[T]] = OrderedDict()
        self.turn: _Turn[T] | None = None
        """The one of this account's in the heap that counts; None while nothing waits."""

    def lane(self, entry: Entry[T]) -> OrderedDict[str, Entry[T]]:
        """Where an entry of this user waits."""
        return self.priority if entry.priority else self.ordinary


_Turn = tuple[float, int, _Account[T]]
"""Effective start, a number that breaks ties in the order turns were given, and whose it is."""


class _Reader(Generic[T]):
    """An account as a walk along the line leaves it, while the account itself stays as it is."""

    __slots__ = ("_lanes", "ordinary", "priority", "start", "turn")

    def __init__(self, account: _Account[T]) -> None:
        self.start, self.turn = account.start, account.turn
        self._lanes = iter(account.ordinary.values()), iter(account.priority.values())
        self.ordinary, self.priority = (next(lane, None) for lane in self._lanes)

    def pass_by(self, entry: Entry[T]) -> None:
        """Go past the first of one kind, as if it had been taken."""
        self.start += _charge(entry)
        following = next(self._lanes[entry.priority], None)
        if entry.priority:
            self.priority = following
        else:
            self.ordinary = following


class Line(Generic[T]):
    """The waiting requests of one model, and whose turn it is.

    What one user has waiting goes in the order it came, `priority` before ordinary.
    """

    def __init__(self, head_start_s: float = 60.0, patience: int = 32) -> None:
        if not 0 <= head_start_s < math.inf or patience < 1:
            raise ValueError("a head start must be at least 0 and finite, patience at least 1")
        self.head_start_s = head_start_s
        """Seconds of work, by weight, that a user's `priority` entries may take before others."""
        self.patience = patience
        """Each `patience` takes, at least one is of the entry that has waited longest."""
        self._waiting: OrderedDict[str, Entry[T]] = OrderedDict()
        self._returned: list[Entry[T]] = []
        self._accounts: dict[str, _Account[T]] = {}
        self._many_accounts = _FEW_ACCOUNTS
        # A heap. A turn that its account has given up stays until it comes to the top.
        self._turns: list[_Turn[T]] = []
        self._ticks = 0
        self._virtual = 0.0
        self._overtaken = 0  # takes of others since the entry that has waited longest is that

    def overtaken_at_most(self, ahead: int) -> int:
        """How many that come later can go before an entry that found `ahead` waiting, whatever comes.

        Each of those ahead, and then the entry itself, is the one that has waited longest for at most
        `patience` takes, the last of which takes it. What is given back counts when first taken.
        """
        return (self.patience - 1) * (ahead + 1)

    def add(self, entry: Entry[T]) -> None:
        """Put an entry in line."""
        self._refuse_twice(entry)
        self._forget_the_idle()
        account = self._accounts.setdefault(entry.user, _Account())
        if account.turn is None:
            account.start = max(account.start, self._virtual)
        urgent = bool(account.priority)
        self._waiting[entry.id] = account.lane(entry)[entry.id] = entry
        if account.turn is None or urgent != bool(account.priority):
            self._give_turn(account)

    def give_back(self, entry: Entry[T]) -> None:
        """Put what was taken at the very head again, uncharged; several in the order they arrived."""
        self._refuse_twice(entry)
        insort(self._returned, entry, key=lambda other: other.arrived)

    def take(self, accepts: Callable[[Entry[T]], bool] | None = None) -> Entry[T] | None:
        """Remove the first entry, in the order of `positions`, that the caller accepts; None without.

        Where the line is empty a replica stands idle: nobody waits for what others have had so far, and
        all start equal again.
        """
        if not self:
            self._accounts.clear()
            self._turns.clear()
            return None
        for entry in self._order():
            if accepts is None or accepts(entry):
                if entry.id in self._waiting:
                    self._charge_and_drop(entry)
                else:
                    self._returned.remove(entry)
                return entry
        return None

    def settle(self, entry: Entry[T], ran_s: float) -> None:
        """Charge a taken entry's user for the seconds it ran, in the place of its estimate."""
        account = self._accounts.get(entry.user)
        if account is None:
            return  # all have started equal again since
        account.start += _charge(entry, ran_s) - _charge(entry)
        if account.turn is not None:
            self._give_turn(account)

    def remove(self, entry_id: str) -> Entry[T] | None:
        """Take an entry out of the line, uncharged; None if it is not here."""
        entry = self._waiting.get(entry_id)
        if entry is None:
            entry = next((other for other in self._returned if other.id == entry_id), None)
            if entry is not None:
                self._returned.remove(entry)
            return entry
        account = self._accounts[entry.user]
        urgent = bool(account.priority)
        self._drop(entry)
        if urgent != bool(account.priority) or not (account.priority or account.ordinary):
            self._give_turn(account)
        return entry

    def remove_all(self, which: Callable[[Entry[T]], bool]) -> list[Entry[T]]:
        """Take out, uncharged, every entry for which `which` says so, and return them."""
        removed = [entry for entry in self if which(entry)]
        for entry in removed:
            self.remove(entry.id)
        return removed

    def positions(self) -> list[tuple[Entry[T], int]]:
        """Every entry and its place from 1, in the order they go if nothing else comes."""
        return [(entry, place) for place, entry in enumerate(self._order(), start=1)]

    def position(self, entry_id: str, within: int = 64) -> int | None:
        """An entry's place, if it is among the first `within`: cheaper than `positions`."""
        first = enumerate(islice(self._order(), within), start=1)
        return next((place for place, entry in first if entry.id == entry_id), None)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._returned)

    def __iter__(self) -> Iterator[Entry[T]]:
        """What was given back, then the others in the order they came."""
        return chain(self._returned, self._waiting.values())

    def __contains__(self, entry_id: object) -> bool:
        return entry_id in self._waiting or any(e.id == entry_id for e in self._returned)

    def _order(self) -> Iterator[Entry[T]]:
        """Walk the line in the order that entries go: the one place where it is decided."""
        yield from self._returned
        while self._turns and self._turns[0] is not self._turns[0][2].turn:
            heappop(self._turns)
        turns, ticks, overtaken = self._turns.copy(), self._ticks, self._overtaken
        readers: dict[_Account[T], _Reader[T]] = {}
        gone: set[str] = set()
        by_age = iter(self._waiting.values())
        oldest = next(by_age, None)
        while oldest is not None:
            due = overtaken + 1 >= self.patience
            account = self._accounts[oldest.user] if due else turns[0][2]
            reader = readers.get(account) or readers.setdefault(account, _Reader(account))
            if not due and turns[0] is not reader.turn:
                heappop(turns)
                continue
            # Who has a turn has something waiting; the last `oldest` is for the type alone.
            entry = oldest if due else reader.priority or reader.ordinary or oldest
            yield entry
            gone.add(entry.id)
            overtaken += 1
            while oldest is not None and oldest.id in gone:
                oldest, overtaken = next(by_age, None), 0
            reader.pass_by(entry)
            last, reader.turn = reader.turn, None
            if reader.priority or reader.ordinary:
                ticks += 1
                reader.turn = (self._effective(reader), ticks, account)
                (heapreplace if turns[0] is last else heappush)(turns, reader.turn)

    def _effective(self, account: _Account[T] | _Reader[T]) -> float:
        """When a user's turn starts, with the head start of a `priority` entry."""
        return account.start - self.head_start_s if account.priority else account.start

    def _give_turn(self, account: _Account[T]) -> None:
        """Give an account the turn that is now its, in the place of the one it had."""
        last, account.turn = account.turn, None
        if not account.priority and not account.ordinary:
            return
        self._ticks += 1
        account.turn = (self._effective(account), self._ticks, account)
        if self._turns and self._turns[0] is last:
            heapreplace(self._turns, account.turn)
            return
        heappush(self._turns, account.turn)
        if len(self._turns) > 2 * len(self._accounts) + _FEW_ACCOUNTS:
            self._turns = [turn for turn in self._turns if turn is turn[2].turn]
            heapify(self._turns)

    def _charge_and_drop(self, entry: Entry[T]) -> None:
        account = self._accounts[entry.user]
        oldest = entry.id == next(iter(self._waiting))
        if account.turn is not None and not (oldest and self._overtaken + 1 >= self.patience):
            # Whoever comes from now on starts where this turn did. A turn that was due by age does not
            # tell where others are: its user may be far ahead of them.
            self._virtual = max(self._virtual, account.turn[0])
        self._overtaken += 1
        account.start += _charge(entry)
        self._drop(entry)
        self._give_turn(account)

    def _drop(self, entry: Entry[T]) -> None:
        if entry.id == next(iter(self._waiting)):
            self._overtaken = 0
        del self._waiting[entry.id], self._accounts[entry.user].lane(entry)[entry.id]

    def _refuse_twice(self, entry: Entry[T]) -> None:
        if entry.id in self:
            raise ValueError(f"{entry.id!r} is in the line already")

    def _forget_the_idle(self) -> None:
        """Drop accounts that say no more than none would, each time their number has doubled."""
        if len(self._accounts) < self._many_accounts:
            return
        for user, account in list(self._accounts.items()):
            if account.turn is None and account.start <= self._virtual:
                del self._accounts[user]
        self._many_accounts = max(_FEW_ACCOUNTS, 2 * len(self._accounts))
