"""Limits on guesses of API keys."""

from __future__ import annotations

from cachetools import LRUCache

_BURST = 10
"""Wrong keys that a caller may send at once."""
_REFILL_S = 10.0
"""Seconds after which the caller may send another wrong key."""
_MAX_REMEMBERED = 4096
"""Maximum callers, and proven keys, that are remembered."""


class TooManyGuessesError(Exception):
    """The caller has sent too many wrong keys; the message says what to do."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(
            "Too many wrong API keys came from your address. Try again in a moment, with the key that the "
            "server's operator gave you."
        )
        self.wait_s = wait_s
        """Seconds until another key is checked."""


class Guesses:
    """The recent wrong keys of each caller, counted in bounded memory.

    After too many, no further key of the caller is checked, except keys that the caller has used before, so
    that other people at the same address can go on. A wrong key that is repeated in a row is one guess.
    """

    def __init__(self) -> None:
        self._forgotten_at: LRUCache[str, float] = LRUCache(_MAX_REMEMBERED)
        """Time from which the last wrong key of each caller no longer counts."""
        self._proven: LRUCache[tuple[str, str], None] = LRUCache(_MAX_REMEMBERED)
        self._last_wrong: LRUCache[str, str] = LRUCache(_MAX_REMEMBERED)
        """Digest of the last wrong key of each caller."""

    def is_proven(self, caller: str, digest: str) -> bool:
        """Return True if the caller has used the key of this digest before."""
        return (caller, digest) in self._proven

    def check(self, caller: str, digest: str, now: float) -> None:
        """Raise a `TooManyGuessesError` if the caller's key of this digest must not be checked now."""
        wait_s = self._forgotten_at.get(caller, now) - now - (_BURST - 1) * _REFILL_S
        if wait_s > 0 and not self.is_proven(caller, digest):
            raise TooManyGuessesError(wait_s)

    def record(self, caller: str, digest: str, now: float, *, is_right: bool) -> None:
        """Record the outcome of the check of a key."""
        if is_right:
            self._proven[caller, digest] = None
        elif self._last_wrong.get(caller) != digest:
            self._last_wrong[caller] = digest
            start = max(self._forgotten_at.get(caller, now), now)
            self._forgotten_at[caller] = start + _REFILL_S
