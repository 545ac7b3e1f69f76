"""An InfluxDB 1 server for one test."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.services.packages import need
from tests.services.process import HOST, Process, free_port
from tests.waiting import until

USER, PASSWORD = "ndif", "p@ss/w%rd:é"
_CONFIG = """\
reporting-disabled = true
bind-address = "{host}:{backup}"
[meta]
dir = "{folder}/meta"
[data]
dir = "{folder}/data"
wal-dir = "{folder}/wal"
[monitor]
store-enabled = false
[http]
bind-address = "{host}:{port}"
auth-enabled = true
"""


class InfluxServer:
    """`influxd` with a password. A context manager; within it, the server can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        program = need("influxd", "influxdb")
        self.port = free_port()
        file = folder / "influxdb.conf"
        file.write_text(
            _CONFIG.format(host=HOST, port=self.port, backup=free_port(), folder=folder)
        )
        command = [program, "run", "-config", str(file)]
        self._process = Process(command, folder / "influxdb.log", self._answers, cwd=folder)

    def url(self, database: str) -> str:
        """Return the URL to which metrics of a database are written."""
        password = quote(PASSWORD, safe="")
        return f"http://{USER}:{password}@{HOST}:{self.port}/{quote(database, safe='')}"

    def create(self, database: str) -> str:
        """Make a database; return its URL."""
        self.query("", f'CREATE DATABASE "{database}"')
        return self.url(database)

    def query(self, database: str, text: str) -> list[dict[str, Any]]:
        """Return the series of a statement."""
        asked = urlencode({"db": database, "q": text}).encode()
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}/query", asked, {"Authorization": f"Basic {pair}"}
        )
        with urllib.request.urlopen(request) as answer:
            (result,) = json.load(answer)["results"]
        assert "error" not in result, result
        series: list[dict[str, Any]] = result.get("series", [])
        return series

    def rows(self, database: str, measurement: str) -> list[dict[str, Any]]:
        """Return the points of a measurement, each with its time, tags and fields."""
        return [
            dict(zip(series["columns"], values, strict=True))
            for series in self.query(database, f'SELECT * FROM "{measurement}"')
            for values in series["values"]
        ]

    def until(self, database: str, measurement: str, least: int = 1) -> list[dict[str, Any]]:
        """Wait until a measurement has `least` points; return its points."""

        def enough_rows() -> list[dict[str, Any]]:
            rows = self.rows(database, measurement)
            return rows if len(rows) >= least else []

        return until(
            enough_rows, lambda: f"{measurement} has {len(self.rows(database, measurement))}"
        )

    def start(self) -> None:
        """Start the server again."""
        self._process.start()

    def stop(self) -> None:
        """Stop the server; it refuses connections until `start`."""
        self._process.stop()

    def __enter__(self) -> InfluxServer:
        self.start()
        # Creating the first user needs no password.
        self.query("", f"CREATE USER {USER} WITH PASSWORD '{PASSWORD}' WITH ALL PRIVILEGES")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/ping"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False
