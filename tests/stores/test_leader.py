"""Processes that share a broker: a leader of another version is not accepted."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
from redis import Redis

from ndif.control.operations import OPERATIONS
from ndif.placement.replica import PlacedReplica
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.request import Request
from ndif.schema.response import Response
from ndif.stores.broker.redis.job_channels import Introduction
from ndif.stores.broker.signing import PROTOCOL, Signer
from ndif.stores.events import OperatorsEvent
from ndif.stores.leader import LeaderLock, SharedCache, has_leader, obstacle
from ndif.stores.redis import connect
from tests.on_loop import on_loop
from tests.services.redis import RedisServer

_KEY = "dispatcher:leader"
FORM = "7028d6ddc71e2657"


@pytest.mark.unit
def test_changed_message_form_needs_new_protocol_number() -> None:
    """The protocol number identifies these fields and events.

    If this fails, set FORM to the new hash; also raise PROTOCOL if the last release has the old form.
    """
    kinds = (Request, Response, DeploymentConfig, PlacedReplica, OperatorsEvent)
    form = {
        **{
            kind.__name__: sorted(field.name for field in dataclasses.fields(kind))
            for kind in kinds
        },
        "introduction": sorted(Introduction.__annotations__),
        "operations": {kind.event: sorted(kind.model_fields) for kind in OPERATIONS},
    }
    text = json.dumps([PROTOCOL, form], sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == FORM


@pytest.mark.process
@on_loop
async def test_leader_of_other_version_is_not_accepted(redis: RedisServer) -> None:
    client, secrets = connect(redis.url), ["the server's secret"]

    def why() -> str | None:
        with Redis(port=redis.port) as plain:
            return obstacle(plain, secrets, "models")

    assert not await has_leader(client)
    assert why() is None
    lock = LeaderLock(client)
    await lock.taken()
    assert await has_leader(client)
    assert why() is None
    await SharedCache(client, Signer(secrets)).write("models", [], 60)
    assert why() is None
    await SharedCache(client, Signer(["another's secret"])).write("models", [], 60)
    assert "another NDIF_CLUSTER_SECRET" in str(why())
    await lock.leave()
    for name in (f"{PROTOCOL + 1} 0123", "0123456789abcdef", f"{PROTOCOL}0 0123"):
        await client.set(_KEY, name)
        assert not await has_leader(client)
        assert "is of another version than this one" in str(why())
    await client.aclose()
