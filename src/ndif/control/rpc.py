"""Operations over the broker: a gateway in another process asks, and the leader performs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ndif.control.control_plane import ControlPlane
from ndif.control.operations import OPERATIONS, STOPPING, Answer, Operation, Stop
from ndif.schema.deployment import OperationError
from ndif.stores.leader import LeaderRpc

_MAX_QUOTED = 100
"""Characters of an unknown event's name that an error repeats."""


class RemoteControlPlane:
    """The gateway's side: sends each operation to the leader, except the one that stops the server."""

    def __init__(self, leader: LeaderRpc, stop: Callable[[], None]) -> None:
        """`stop` ends the server that this gateway belongs to."""
        self._leader = leader
        self._stop = stop

    async def perform(self, operation: Operation) -> Answer:
        """Ask the leader to perform the operation and return its answer.

        Raises:
            OperationError: If it cannot be performed, or no process leads.
        """
        if isinstance(operation, Stop):
            self._stop()
            return STOPPING
        answer: Answer = await self._leader.ask(operation.event, operation.model_dump(mode="json"))
        return answer


async def perform_event(control: ControlPlane, event: str, arguments: Mapping[str, Any]) -> Answer:
    """Perform the operation that an event asks the leader for.

    Raises:
        OperationError: If there is no such event, or its operation cannot be performed.
    """
    for kind in OPERATIONS:
        if kind.event == event:
            return await kind.model_validate(arguments).perform(control)
    raise OperationError(400, f"There is no event {event[:_MAX_QUOTED]!r}.")
