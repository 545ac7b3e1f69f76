"""Write the dashboards: `python -m deploy.grafana.make`, after a change of this folder."""

from __future__ import annotations

from deploy.grafana.make.files import DASHBOARDS, FOLDER, text_of

for name, dashboard in DASHBOARDS.items():
    (FOLDER / name).write_text(text_of(dashboard))
