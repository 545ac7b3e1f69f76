"""Operations from another process: each is an event of `dispatcher:events` (specification, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ndif.queue.operations import Operations
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.operation import OperationError
from ndif.stores.coordination.events import Events


class RemoteOperations:
    """A gateway's side: asks whoever leads."""

    def __init__(self, events: Events, stop: Callable[[], None]) -> None:
        """`stop` ends the server that this gateway belongs to."""
        self._events = events
        self._stop = stop

    async def deploy(
        self,
        configs: Sequence[DeploymentConfig],
        generation: str | None,
        *,
        wait: bool,
        sync: bool,
    ) -> list[dict[str, Any]]:
        """See `Operations.deploy`."""
        arguments = {"configs": [asdict(config) for config in configs], "generation": generation}
        told: list[dict[str, Any]] = await self._events.ask(
            "DEPLOY", {**arguments, "wait": wait, "sync": sync}
        )
        return told

    async def evict(
        self, model: str, replica_id: str | None, *, cold: bool
    ) -> list[dict[str, Any]]:
        """See `Operations.evict`."""
        arguments = {"model": model, "replica_id": replica_id, "cold": cold}
        told: list[dict[str, Any]] = await self._events.ask("EVICT", arguments)
        return told

    async def scale(
        self, model: str, replicas: int, generation: str | None
    ) -> list[dict[str, Any]]:
        """See `Operations.scale`."""
        arguments = {"model": model, "replicas": replicas, "generation": generation}
        told: list[dict[str, Any]] = await self._events.ask("SCALE", arguments)
        return told

    async def restart(self, model: str) -> list[dict[str, Any]]:
        """See `Operations.restart`."""
        told: list[dict[str, Any]] = await self._events.ask("RESTART", {"model": model})
        return told

    async def kill(self, request_id: str) -> bool:
        """See `Operations.kill`."""
        return bool(await self._events.ask("KILL_REQUEST", {"request_id": request_id}))

    async def status(self) -> dict[str, Any]:
        """See `Operations.status`."""
        told: dict[str, Any] = await self._events.ask("STATUS", {})
        return told

    async def queue(self) -> dict[str, Any]:
        """See `Operations.queue`."""
        told: dict[str, Any] = await self._events.ask("QUEUE_STATE_REQUEST", {})
        return told

    async def export(self) -> list[dict[str, Any]]:
        """See `Operations.export`."""
        told: list[dict[str, Any]] = await self._events.ask("EXPORT", {})
        return told

    async def stop(self) -> None:
        """End the server that this gateway belongs to."""
        self._stop()


async def carry_out(operations: Operations, event: str, arguments: Mapping[str, Any]) -> Any:
    """What the leader does at an event.

    Raises:
        OperationError: what must be said of it.
    """
    match event:
        case "DEPLOY":
            configs = [DeploymentConfig(**config) for config in arguments["configs"]]
            return await operations.deploy(
                configs, arguments["generation"], wait=arguments["wait"], sync=arguments["sync"]
            )
        case "EVICT":
            return await operations.evict(
                arguments["model"], arguments["replica_id"], cold=arguments["cold"]
            )
        case "SCALE":
            return await operations.scale(
                arguments["model"], arguments["replicas"], arguments["generation"]
            )
        case "RESTART":
            return await operations.restart(arguments["model"])
        case "KILL_REQUEST":
            return await operations.kill(arguments["request_id"])
        case "STATUS":
            return await operations.status()
        case "QUEUE_STATE_REQUEST":
            return await operations.queue()
        case "EXPORT":
            return await operations.export()
    raise OperationError(400, f"There is no event {event[:100]!r}.")
