"""The port through which a gateway uses the leader, and its implementation within the same process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ndif.cluster.models import Models
from ndif.cluster.status import client_status, describe_details
from ndif.control.control_plane import ControlPlane
from ndif.control.operations import Operation
from ndif.schema.client_status import ServerStatus
from ndif.schema.model_key import ModelKey
from ndif.schema.public_state import NextState
from ndif.schema.status import Status
from ndif.schema.structure import ModelDetails
from ndif.stores.events import OperatorsEvent
from ndif.stores.responder import StoredResponse


class Catalogue(Protocol):
    """The models of a server and their state, as clients see them.

    The methods raise an `OperationError` (503) while the models are unknown.
    """

    async def models(self) -> Models:
        """Return every model."""

    async def status(self) -> ServerStatus:
        """Return the answer of `GET /status`."""

    async def details(self, key: ModelKey) -> ModelDetails:
        """Return the details of a model."""

    async def connected(self) -> bool:
        """Return True if the server can run a request that arrives now."""


class Leader(Catalogue, Protocol):
    """The leader of a server: its models, queue, operations and log of events."""

    async def perform(self, operation: Operation) -> Any:
        """Perform an operation and return its answer.

        Raises:
            OperationError: If the operation cannot be performed, or the server has no leader.
        """

    async def update_of(self, request_id: str, stored: Status | None) -> StoredResponse | None:
        """Return an update that is newer than a request's stored update; None if there is none.

        `stored` is the status of the stored update. For a waiting request, the new update has its place in
        the queue; for a lost request, it is an ERROR.
        """

    async def record(self, events: Sequence[OperatorsEvent]) -> None:
        """Add events to the operators' log."""

    async def next_state(self, last_name: str, users: Sequence[str]) -> NextState:
        """Return the state of the dashboard once its name differs from `last_name`; see `Overview.next`."""


@dataclass(frozen=True)
class InProcessLeader:
    """`Leader` within the leader's own process."""

    _control: ControlPlane

    async def models(self) -> Models:
        return self._control.controller.models

    async def status(self) -> ServerStatus:
        control = self._control
        return client_status(control.controller, control.reconciler.coming(), control.histories)

    async def details(self, key: ModelKey) -> ModelDetails:
        return describe_details(self._control.controller.models, key)

    async def connected(self) -> bool:
        # Unless the models are fixed, a model loads on its first request.
        controller = self._control.controller
        return not controller.models.fixed or any(
            replica.serving for replica in controller.replicas()
        )

    async def perform(self, operation: Operation) -> Any:
        return await operation.perform(self._control)

    async def update_of(self, request_id: str, stored: Status | None) -> StoredResponse | None:
        return self._control.dispatcher.update_of(request_id, is_stored=stored is not None)

    async def record(self, events: Sequence[OperatorsEvent]) -> None:
        for event in events:
            self._control.events.add(event)

    async def next_state(self, last_name: str, users: Sequence[str]) -> NextState:
        return await self._control.overview.next(last_name, users)
