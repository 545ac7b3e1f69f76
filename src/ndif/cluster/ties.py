"""Ties: who decides among places that are equally good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Dice(Protocol):
    """What a decision asks of chance; a seeded `random.Random` is one."""

    def choice(self, seq: Sequence[T], /) -> T:
        """One of several that are as good as each other."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """For an id."""
        ...


class EveryWay:
    """Decides ties one way after another, until it has been through all of them."""

    def __init__(self, dice: Dice) -> None:
        """`dice`: for ids."""
        self._dice = dice
        self._path: list[tuple[int, int]] = []
        """What was chosen, and of how many, at each tie of this way."""
        self._at = 0

    def choice(self, seq: Sequence[T], /) -> T:
        """See `Dice.choice`."""
        if self._at == len(self._path):
            self._path.append((0, len(seq)))
        chosen, _ = self._path[self._at]
        self._at += 1
        return seq[chosen]

    def getrandbits(self, k: int, /) -> int:
        """See `Dice.getrandbits`."""
        return self._dice.getrandbits(k)

    def next(self) -> bool:
        """Go on to the next way; whether there is one."""
        self._at = 0
        while self._path:
            chosen, several = self._path.pop()
            if chosen + 1 < several:
                self._path.append((chosen + 1, several))
                return True
        return False
