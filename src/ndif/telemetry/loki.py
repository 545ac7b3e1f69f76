"""The handler that sends lines of the log to Grafana Loki."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from ndif.telemetry.endpoint import Endpoint
from ndif.telemetry.shipper import Shipper, ShippingPolicy

_POLICY = ShippingPolicy(max_waiting=16 << 20, max_batch=1 << 20)
"""Numbers of characters; each line counts `_LINE_OVERHEAD` more, for its objects in memory."""
_LINE_OVERHEAD = 200
_MAX_LINE = 64 << 10
"""Characters to which a line is cut; by default, Loki refuses lines of more than 256 KiB."""
_LEVELS = ("debug", "info", "warning", "error", "critical")


class _Line(NamedTuple):
    time_ns: int
    level: str
    text: str


class LokiHandler(logging.Handler):
    """Sends formatted records to Loki from its own thread; logging never waits for Loki.

    A line's labels are `job`, `process` and `level`; its text has all other fields. The handler drops
    records that its own thread logs, because each of them would cause another.
    """

    def __init__(self, url: str, process: str, policy: ShippingPolicy = _POLICY) -> None:
        """Send to the server at `url`, with the URL's user and password; `process` names this process."""
        super().__init__()
        self._process = process
        path = urlsplit(url).path.rstrip("/")
        self._endpoint = Endpoint(url, f"{path}/loki/api/v1/push", "application/json")
        self._shipper = Shipper[_Line]("loki", self._push, policy)
        # A filter and not a check in `emit`: the handler's lock is taken before `emit`, and
        # `logging.shutdown` holds this lock while it waits for the thread.
        self.addFilter(lambda record: threading.get_ident() != self._shipper.thread_id)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:_MAX_LINE]
        except Exception:
            self.handleError(record)
            return
        level = _LEVELS[min(max(record.levelno // 10 - 1, 0), len(_LEVELS) - 1)]
        line = _Line(int(record.created * 1e9), level, text)
        self._shipper.put(line, len(text) + _LINE_OVERHEAD)

    def close(self) -> None:
        """Send the queued lines, for two seconds at most. `logging` calls this when the process ends."""
        self._shipper.close()
        super().close()

    def _push(self, batch: Sequence[_Line]) -> None:
        streams = [
            {
                "stream": {"job": "ndif", "process": self._process, "level": level},
                "values": [[str(line.time_ns), line.text] for line in batch if line.level == level],
            }
            for level in dict.fromkeys(line.level for line in batch)
        ]
        self._endpoint.post(json.dumps({"streams": streams}).encode())
