"""One measured number beside its limit."""

from __future__ import annotations

from dataclasses import dataclass

MB = 1 << 20


@dataclass
class Figure:
    """One measured number beside its limit."""

    name: str
    value: float
    limit: float
    unit: str
    at_most: bool = True
    how: str = ""

    @property
    def holds(self) -> bool:
        """Whether the value is within the limit."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit
