"""Panels of dashboards: curves, single values, the list of alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.grafana.make.source import Source

_HEIGHT, _STAT_HEIGHT = 8, 4
RED, YELLOW, GREEN = "red", "yellow", "green"


@dataclass(frozen=True)
class Panel:
    """Curves, or the last value of each query, with the unit of their values."""

    title: str
    description: str
    unit: str
    queries: Mapping[str, str]
    """Queries by the legend of their series."""
    is_stacked: bool = False
    most: float | None = None
    """Greatest value of the axis; None where the values say."""

    type = "timeseries"
    height = _HEIGHT

    def fields(self, source: Source) -> dict[str, Any]:
        """Return what Grafana draws the panel by."""
        custom = {
            "fillOpacity": 30 if self.is_stacked else 8,
            "showPoints": source.points,
            "stacking": {"mode": "normal" if self.is_stacked else "none"},
        }
        most = {} if self.most is None else {"max": self.most}
        return {
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, **most, "custom": custom},
                "overrides": [],
            },
            "options": {
                "legend": {
                    "displayMode": "table",
                    "placement": "bottom",
                    "calcs": ["lastNotNull", "max"],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            },
            "targets": self._targets(source),
        }

    def _targets(self, source: Source) -> list[dict[str, Any]]:
        return [
            {
                "refId": chr(ord("A") + number),
                "datasource": source.reference,
                **source.target(legend, query),
            }
            for number, (legend, query) in enumerate(self.queries.items())
        ]


@dataclass(frozen=True)
class Stat(Panel):
    """The last value, coloured from a step on."""

    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    """Colours by the value from which on they apply; None: from below all others."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that stand for values."""
    nothing: str = ""
    """Text where a query has no answer; empty: Grafana's own."""

    type = "stat"
    height = _STAT_HEIGHT

    def fields(self, source: Source) -> dict[str, Any]:
        """See `Panel.fields`."""
        options = {value: {"text": text} for value, text in self.words.items()}
        nothing = {"noValue": self.nothing} if self.nothing else {}
        return {
            "fieldConfig": {
                "defaults": {
                    "unit": self.unit,
                    **nothing,
                    "mappings": [{"type": "value", "options": options}] if options else [],
                    "thresholds": {
                        "mode": "absolute",
                        "steps": [{"value": value, "color": color} for value, color in self.steps],
                    },
                },
                "overrides": [],
            },
            "options": {
                "colorMode": "background",
                "graphMode": "none",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "textMode": "auto",
            },
            "targets": self._targets(source),
        }


@dataclass(frozen=True)
class AlertList:
    """The alerts that fire, or soon will, of every data source: the list reads no variable."""

    title: str
    description: str

    type = "alertlist"
    height = _HEIGHT

    def fields(self, _: Source) -> dict[str, Any]:
        """See `Panel.fields`."""
        return {
            "options": {
                "alertName": "Ndif",
                "dashboardAlerts": False,
                "groupBy": [],
                "groupMode": "default",
                "maxItems": 30,
                "sortOrder": 3,
                "stateFilter": {"firing": True, "pending": True, "error": True},
                "viewMode": "list",
            }
        }


AnyPanel = Panel | AlertList
Rows = Mapping[str, Sequence[AnyPanel]]
