"""Operations over JSON and over the broker's events; `tests/queue/test_whole.py` performs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ndif.control.answers import Stopping
from ndif.control.control_plane import ControlPlane, outcome_of
from ndif.control.operations import (
    OPERATIONS,
    CollectGarbage,
    Deploy,
    Evict,
    Export,
    GetJobs,
    GetQueue,
    GetStatus,
    GetTrace,
    GetUsage,
    Kill,
    KillKey,
    ListAlerts,
    ListCallbacks,
    ListEvents,
    ListKept,
    Operation,
    Restart,
    RetryCallbacks,
    Scale,
    SendTestAlerts,
    Stop,
    parse_operation,
)
from ndif.control.remote_leader import RemoteLeader, answer_call
from ndif.gateway.openapi import example_of
from ndif.schema.answer import from_plain
from ndif.schema.deployment import DeploymentConfig, OperationError
from ndif.schema.deployment_settings import DeploymentChange
from ndif.schema.repositories import Repositories
from ndif.stores.events import EventLog, event
from ndif.stores.leader import LeaderRpc
from tests.on_loop import on_loop

CONFIG = DeploymentConfig("org/name", "/models/x", replicas=2, execution_timeout_s=90.0)
GIVEN = frozenset({"checkpoint", "replicas", "execution_timeout_s", "dedicated"})
"""Names of given settings; one has its default value."""
SAMPLES: tuple[Operation, ...] = (
    GetStatus(),
    GetQueue(),
    Export(),
    Deploy(
        deployments=(DeploymentChange.complete(CONFIG),), generation="0.8", wait=True, sync=True
    ),
    Deploy(deployments=(DeploymentChange(CONFIG, GIVEN),)),
    Evict(model="org/name", replica="r1", cold=True),
    Scale(model="org/name", replicas=3),
    Restart(model="org/name"),
    Kill(request_id="r", user="u"),
    KillKey(account="k", revoked=True),
    GetJobs(user="u", limit=7),
    GetTrace(job_id="j", user="u"),
    CollectGarbage(dry_run=True),
    GetUsage(by="day", since="2026-11-24", user="u"),
    ListCallbacks(),
    RetryCallbacks(request_id="r"),
    ListAlerts(),
    SendTestAlerts(),
    ListEvents(),
    ListKept(),
    Stop(),
)


class EventStream:
    """Calls that this process answers, encoded as JSON."""

    def __init__(self, control: ControlPlane) -> None:
        self.asked: list[str] = []
        self._control = control

    async def ask(self, event: str, arguments: Mapping[str, Any]) -> bytes:
        self.asked.append(event)
        return await answer_call(self._control, event, json.loads(json.dumps(arguments)))


def leader(
    rpc: object, timeout_s: float = 60.0, stop: Callable[[], None] = lambda: None
) -> RemoteLeader:
    """Return a gateway's remote leader; `rpc` answers its calls."""
    nothing = cast(Any, None)
    repositories = Repositories()
    return RemoteLeader(
        cast(LeaderRpc, rpc), nothing, nothing, repositories, timeout_s=timeout_s, stop=stop
    )


def answer_of(kind: type[Operation]) -> Any:
    """Return the example answer of the API document."""
    example = example_of(kind.answer)
    return from_plain(kind.answer, example)


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """The performed operations, which have no effect here."""
    performed: list[Operation] = []

    async def perform(self: Operation, _: ControlPlane) -> Any:
        performed.append(self)
        return answer_of(type(self))

    for kind in OPERATIONS:
        monkeypatch.setattr(kind, "perform", perform)
    return performed


def test_every_operation_has_sample_and_unique_names() -> None:
    assert {type(sample) for sample in SAMPLES} == set(OPERATIONS)
    for names in (
        [kind.name for kind in OPERATIONS],
        [kind.event for kind in OPERATIONS],
    ):
        assert len(set(names)) == len(OPERATIONS)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_operation_round_trips_through_json(sample: Operation) -> None:
    assert parse_operation(type(sample), sample.model_dump_json().encode()) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
@on_loop
async def test_leader_performs_operation_of_another_process(
    sample: Operation, performed: list[Operation]
) -> None:
    stopped: list[bool] = []
    events = EventStream(cast(ControlPlane, None))
    remote = leader(events, stop=lambda: stopped.append(True))
    answer = await remote.perform(sample)
    if isinstance(sample, Stop):
        # Stop ends the gateway's own server, which ends the leader.
        assert (answer, stopped, performed) == (Stopping(stopping=True), [True], [])
        return
    assert answer == answer_of(type(sample))
    assert (performed, events.asked, stopped) == ([sample], [sample.event], [])


@on_loop
async def test_leader_records_events_of_another_process() -> None:
    log = EventLog()
    events = EventStream(cast(ControlPlane, SimpleNamespace(events=log)))
    noted = event("deployed", "org/a", "1 replica.", "login", 1.0)
    await leader(events).record([noted])
    assert log.latest() == [noted]


@on_loop
async def test_events_without_leader_are_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Nobody:
        async def ask(self, *_: object) -> Any:
            raise OperationError(503, "No process of this server leads now.")

    await leader(Nobody()).record([event("deployed", "org/a", "1 replica.", "login", 1.0)])
    assert "deployed org/a, by login: 1 replica." in caplog.text


@on_loop
async def test_unknown_event_is_rejected() -> None:
    with pytest.raises(OperationError, match="There is no event 'NONE'") as caught:
        await answer_call(cast(ControlPlane, None), "NONE", {})
    assert caught.value.status == 400


@on_loop
async def test_call_to_silent_leader_times_out() -> None:
    class Silent:
        async def ask(self, *_: object) -> Any:
            await asyncio.Event().wait()

    remote = leader(Silent(), timeout_s=0.01)
    with pytest.raises(OperationError, match=r"within 0s \(STATUS_REQUEST_TIMEOUT_S\)") as error:
        await remote.perform(GetStatus())
    assert error.value.status == 504


def test_outcome_includes_evicted_models_without_replica() -> None:
    model = SimpleNamespace(config=CONFIG, problems={})
    request = SimpleNamespace(model=model, generation="0.8", replicas=1, withdrawn=False)
    result = SimpleNamespace(replica_ids=("r1",), evicted=(("org/a@0.8", "r2"),), problem=None)
    outcome = outcome_of(cast(Any, request), cast(Any, result), [("org/b@0.8", None)])
    assert [evicted.replica_id for evicted in outcome.evicted] == [None, "r2"]
