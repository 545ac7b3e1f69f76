"""Dashboards: rows of panels, whose ids and places follow from their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.grafana.make.panels import Rows
from deploy.grafana.make.source import Source

_SCHEMA = 39
"""Version of the form of dashboards, that of Grafana 10.4; later ones read it."""
_COLUMNS = 24


def dashboard(source: Source, uid: str, title: str, description: str, rows: Rows) -> dict[str, Any]:
    """Return a dashboard as Grafana reads it."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [source.tag],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": source.link,
                "tags": [source.tag],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [*_variables(source)]},
        "annotations": {"list": []},
        "panels": [*_panels(source, rows)],
    }


def _variables(source: Source) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": source.type,
    }
    for variable in source.variables:
        yield {
            "name": variable.name,
            "label": variable.label,
            "type": "query",
            "datasource": source.reference,
            "query": {"query": variable.query, "refId": variable.name},
            "definition": variable.query,
            "refresh": 2,  # with the time range: models come and go
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(source: Source, rows: Rows) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for heading, panels in rows.items():
        yield {
            "id": number,
            "type": "row",
            "title": heading,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        width, height = _COLUMNS // len(panels), max(panel.height for panel in panels)
        for place, panel in enumerate(panels):
            yield {
                "id": number + 1 + place,
                "type": panel.type,
                "title": panel.title,
                "description": panel.description,
                "datasource": source.reference,
                "gridPos": {"x": place * width, "y": y + 1, "w": width, "h": height},
                **panel.fields(source),
            }
        number += 1 + len(panels)
        y += 1 + height
