"""Labels of models in metrics, whatever names clients send."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ndif.control.operations import GetStatus
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.status import Status
from ndif.simulation.virtual_time import run
from ndif.telemetry.exposition import exposition
from ndif.telemetry.state import families
from tests.queue.test_whole import World
from tests.services.prometheus import promtool
from tests.waiting import virtual_time_passes as elapse

_INVENTED = 600


async def exposed(world: World) -> str:
    """Return the answer of `GET /metrics` for a server."""
    state = await GetStatus().perform(world.operations)
    return exposition("", families(state))[0].decode()


def samples(text: str) -> int:
    """Return the number of time series."""
    return sum(len(family.samples) for family in text_string_to_metric_families(text))


def labels(text: str, metric: str) -> set[str]:
    """Return the models that a metric names."""
    return {
        sample.labels["model"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == metric
    }


async def refused(world: World, names: Iterable[str]) -> None:
    """Send a request for each model, and wait for their errors."""
    responses = await world.until_ended(*[await world.send(name) for name in names])
    assert {response.status for response in responses} == {Status.ERROR}


def of_clients(number: int) -> list[str]:
    """Return invented names of models; no other test uses them."""
    return [f"{uuid.uuid4().hex}/model" for _ in range(number)]


@pytest.mark.process
def test_invented_models_share_one_label_and_real_model_has_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        async with World(tmp_path, {"labels/real": 60}) as world:
            await refused(world, of_clients(1))
            before = samples(await exposed(world))
            invented = of_clients(_INVENTED)
            await refused(world, invented)
            text = await exposed(world)
            assert samples(text) == before
            assert not any(name in text for name in invented)
            await world.until_ended(await world.send("labels/real"))
            text = await exposed(world)
            for metric in ("ndif_jobs_total", "ndif_model_load_seconds_count", "ndif_queue_depth"):
                assert "labels/real" in labels(text, metric), metric
            assert promtool("check", "metrics", content=text.encode()) == ""

    run(main())


def test_waiting_requests_for_invented_models_share_one_label(tmp_path: Path) -> None:
    async def main() -> None:
        config = DeploymentConfig("labels/deployed", "labels/deployed")
        async with World(tmp_path, {}, configs=(config,)) as world:
            invented = of_clients(_INVENTED)
            sent = [await world.send(name) for name in invented]
            await elapse(0.5)  # measuring a model takes a second
            text = await exposed(world)
            assert labels(text, "ndif_queue_depth") == {"labels/deployed", "other"}
            assert f'ndif_queue_depth{{generation="",model="other"}} {len(sent)}.0\n' in text
            await world.until_ended(*sent)

    run(main())
