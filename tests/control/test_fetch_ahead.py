"""Downloads ahead of a booking, in a cluster whose nodes fail and leave."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta, timezone

import pytest

from ndif.cluster.controller import Controller
from ndif.cluster.models import Models
from ndif.control.fetch_ahead import FetchAhead
from ndif.host.evaluation import Measured
from ndif.host.port import ActorError, ModelActor
from ndif.placement.node import Node
from ndif.placement.replica import PlacedReplica
from ndif.placement.resources import Resources
from ndif.schedule.schedule import Window
from ndif.schema.deployment import DeploymentConfig
from ndif.stores.events import EventLog
from tests.on_loop import on_virtual_loop


@on_virtual_loop
async def test_files_are_fetched_ahead_on_every_node_of_booking(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    nodes = [Node(name, name, Resources.of([24], 0, 1.0)) for name in ("one", "two")]
    now = datetime(2026, 3, 3, 8, tzinfo=timezone.utc)
    asked: list[str] = []
    ended: list[str] = []

    def no_actor(config: DeploymentConfig, generation: str, place: PlacedReplica) -> ModelActor:
        raise AssertionError("nothing is placed")

    async def measured(config: DeploymentConfig, generation: str) -> Measured:
        return Measured(20)

    async def discover() -> list[Node]:
        return nodes

    full = {"two"}

    async def fetch(config: DeploymentConfig, generation: str, node_id: str) -> None:
        asked.append(node_id)
        if node_id in full:
            raise ActorError("its disk is full")
        await asyncio.sleep(0.05)
        ended.append(node_id)

    controller, events = Controller(Models(), no_actor, measured, discover), EventLog()
    await controller.discover()
    ahead = FetchAhead(controller, fetch, timedelta(hours=1), events, lambda: now)
    config = DeploymentConfig("a/a", "a/a", replicas=2)
    booking = Window(config, now + timedelta(minutes=50), now + timedelta(hours=2), "a/a")

    async def fetched_now() -> list[str]:
        asked.clear()
        ended.clear()
        ahead.update([booking], lambda _: "0.8")
        await asyncio.wait(ahead._tasks.values())
        return sorted(asked)

    assert await fetched_now() == ["one", "two"]
    assert ended == ["one"]  # even if the other node fails
    assert "a/a could not be downloaded ahead of its booking: its disk is full" in caplog.text
    full.clear()
    assert await fetched_now() == []  # no immediate retry
    now += timedelta(minutes=10)
    assert await fetched_now() == ["one", "two"]
    assert sorted(ended) == ["one", "two"]
    now += timedelta(minutes=10)
    assert await fetched_now() == []
    assert [event.kind for event in events.latest()] == ["fetched"]
    # One node leaves and another joins.
    nodes[0] = Node("three", "three", Resources.of([24], 0, 1.0))
    await controller.discover()
    assert await fetched_now() == ["three", "two"]
    del nodes[0]
    await controller.discover()
    now += timedelta(minutes=10)
    assert await fetched_now() == ["two"]
    assert "now there is room for 1 of 2 replicas" in caplog.text
    await ahead.stop()
