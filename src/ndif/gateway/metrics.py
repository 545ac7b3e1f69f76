"""`GET /metrics`: the counters of this host's processes, and the state of the whole server."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from itertools import chain
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from ndif.control.operations import GetStatus, Perform
from ndif.gateway.caller import caller_of
from ndif.gateway.http_error import HttpError
from ndif.gateway.openapi import Answer, ApiRoute, Description
from ndif.hostname import is_loopback
from ndif.schema.deployment import OperationError
from ndif.schema.server_state import ServerState
from ndif.stores.disk import disk_usage
from ndif.stores.ping import Ping, ask
from ndif.tasks import within
from ndif.telemetry import state
from ndif.telemetry.exposition import exposition

logger = logging.getLogger(__name__)

_STATE_S = 1.0
"""Seconds for which the answers of the leader and the stores are reused."""
_PATIENCE_S = 2.0
_TEXT = "text/plain"
_METRICS = Description(
    "operation",
    "Metrics for Prometheus",
    "Served to this machine, to the networks of NDIF_METRICS_ALLOW, and for the operator's token.",
    answers={
        200: Answer(
            {"type": "string"},
            "Prometheus' text, or OpenMetrics if the client accepts it.",
            "ndif_leader_up 1.0\n",
            (_TEXT,),
        )
    },
    refusals={403: "The client's address is not allowed, and it has no token."},
)
_ELSEWHERE = (
    "Metrics are for this machine, the networks that the operator names (NDIF_METRICS_ALLOW), and clients "
    "that send the operator's token (Authorization: Bearer TOKEN)."
)


@dataclass
class MetricsRoute:
    """Serves metrics to this machine, to the allowed networks, and for the operator's token."""

    perform: Perform
    stores: Mapping[str, Ping]
    folder: Path
    """Folder whose disk's usage is reported."""
    allowed: Sequence[IPv4Network | IPv6Network]
    token: str | None
    _server: ServerState | None = None
    _answers: Mapping[str, bool] = field(default_factory=dict)
    _refreshed_at: float = field(default=float("-inf"))
    _refreshing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def routes(self) -> list[BaseRoute]:
        """Return the route."""
        return [ApiRoute("/metrics", self.metrics, _METRICS)]

    async def metrics(self, http: Request) -> Response:
        """Answer with every metric."""
        if not self._may_read(http):
            raise HttpError(403, _ELSEWHERE)
        await self._refresh()
        families = chain(
            state.families(self._server),
            state.stores(self._answers),
            state.disk(disk_usage(self.folder)),
        )
        # Encoding takes milliseconds, too long for the event loop.
        content, content_type = await asyncio.to_thread(
            exposition, http.headers.get("accept", ""), families
        )
        return Response(content, headers={"Content-Type": content_type})

    def _may_read(self, http: Request) -> bool:
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        if self.token and scheme.lower() == "bearer":
            return secrets.compare_digest(
                token.strip().encode(errors="replace"), self.token.encode()
            )
        caller = caller_of(http)
        if is_loopback(caller.address):
            # Loopback without a uid may be a local proxy that forwards a request from elsewhere.
            return caller.uid is not None
        try:
            address = ipaddress.ip_address(caller.address)
        except ValueError:
            return False
        return any(address in network for network in self.allowed)

    async def _refresh(self) -> None:
        """Ask the leader and every store, at most once a second."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed_at < _STATE_S:
                return
            self._server, errors = await asyncio.gather(
                self._current_state(), ask(self.stores, _PATIENCE_S)
            )
            for store, error in errors.items():
                if error is not None:
                    logger.warning("the store of %s does not answer: %s", store, error)
            self._answers = {store: error is None for store, error in errors.items()}
            self._refreshed_at = time.monotonic()

    async def _current_state(self) -> ServerState | None:
        """Return the state of the server; None if there is no leader, or no answer in time."""
        try:
            server: ServerState = await within(self.perform(GetStatus()), _PATIENCE_S)
        except (OperationError, asyncio.TimeoutError) as error:
            logger.warning("metrics have no state of the server: %s", error)
            return None
        return server
