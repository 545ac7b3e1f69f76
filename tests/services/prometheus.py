"""A Prometheus server for one test, and `promtool`."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.services.packages import need
from tests.services.process import HOST, Process, free_port
from tests.waiting import until


def promtool(*arguments: str, content: bytes = b"") -> str:
    """Return the problems that `promtool` finds; "" if there are none."""
    program = need("promtool", "prometheus")
    process = subprocess.run([program, *arguments], input=content, capture_output=True)
    output = (process.stdout + process.stderr).decode().strip()
    assert process.returncode == 0 or output, process.returncode
    return output if process.returncode != 0 else ""


class PrometheusServer:
    """`prometheus` that scrapes addresses every second. A context manager."""

    def __init__(self, folder: Path, *targets: str, rules: Sequence[Path] = ()) -> None:
        """Set the server up; `rules` are files of alerts."""
        program = need("prometheus", "prometheus")
        self.url = f"http://{HOST}:{free_port()}"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [*map(str, rules)],
            "scrape_configs": [{"job_name": "ndif", "static_configs": [{"targets": [*targets]}]}],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        command = [
            program,
            *(f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self._process = Process(command, folder / "prometheus.log", self._answers, cwd=folder)

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API answer; raise an error with Prometheus's message."""
        url = f"{self.url}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the current samples of a query."""
        samples: list[dict[str, Any]] = self.get("query", query=text)["result"]
        return samples

    def until(self, text: str) -> list[dict[str, Any]]:
        """Wait until a query has samples; return them."""
        return until(lambda: self.query(text), lambda: f"{text} returns nothing")

    def __enter__(self) -> PrometheusServer:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False
