"""Types of data sources, as panels and variables ask them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Variable(NamedTuple):
    """A choice at the top of a dashboard, of values that a query has."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Source:
    """A type of data source. Those of its dashboards are linked to each other, and share variables."""

    type: str
    tag: str
    """Tag of its dashboards, by which they are linked."""
    link: str
    """Title of the links."""
    target: Callable[[str, str], dict[str, Any]]
    """Function that returns what a panel asks, by legend and query."""
    variables: Sequence[Variable]
    points: str
    """Grafana's word for which values of a curve have a dot."""

    @property
    def reference(self) -> dict[str, str]:
        """Return the data source that is chosen at the top of a dashboard."""
        return {"type": self.type, "uid": "${datasource}"}
