"""A quantity over time: how much of it there was in each hour."""

from __future__ import annotations

HOUR_S = 3600.0


class Meter:
    """Adds up something that is at one level until it changes, in unit-seconds by the hour."""

    __slots__ = ("_level", "_since", "hours")

    def __init__(self) -> None:
        self.hours: list[float] = []
        """Unit-seconds in each hour since the beginning; none beyond the last `read`."""
        self._level = 0.0
        self._since = 0.0

    def change(self, now: float, by: float) -> None:
        """It is so much more from now on."""
        self.read(now)
        self._level += by

    def read(self, now: float) -> float:
        """Unit-seconds from the beginning until now."""
        while self._since < now:
            hour = int(self._since // HOUR_S)
            until = min((hour + 1) * HOUR_S, now)
            self.hours += [0.0] * (hour + 1 - len(self.hours))
            self.hours[hour] += self._level * (until - self._since)
            self._since = until
        return sum(self.hours)
