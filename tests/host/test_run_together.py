"""A replica that runs several trusted requests in one forward pass."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from nnsight import TransformersModel

from ndif.config.settings import Settings
from ndif.host import shared_passes
from ndif.host.port import ReplicaEvictedError, ReplicaLostError
from ndif.host.runtimes import Runtime
from ndif.schema.payload import PayloadFile
from ndif.schema.request import Request
from ndif.schema.response import InlineResult, StoredResult
from ndif.schema.status import Status
from ndif.stores.objects import FileStore
from ndif.stores.objects.port import result_key
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.generations.blocks import edits, fails, generates, prints, reads
from tests.runtime.replica import (
    HERE,
    Sent,
    Served,
    a_replica,
    a_request,
    alive,
    serve,
    values_of,
)
from tests.waiting import eventually

pytestmark = pytest.mark.process

SHARING = Settings(co_batch=8)


@pytest.fixture(scope="module")
def payloads(tiny_gpt2: Path) -> dict[str, bytes]:
    client = TransformersModel(str(tiny_gpt2), task="text-generation")

    def payload(block: Any) -> bytes:
        sent = Sent()
        block(client, sent)
        return sent.payload

    def holds_it_up(model: TransformersModel, sent: Sent) -> None:
        """Never end, with a trace that can share a pass."""
        with model.trace("The Eiffel Tower is in", backend=sent):
            for _ in range(1 << 60):
                pass
            logits = model.lm_head.output.save()  # noqa: F841

    blocks = (reads, edits, fails, prints, generates, holds_it_up)
    return {block.__name__: payload(block) for block in blocks}


async def together(served: Served, requests: Sequence[Request]) -> list[Any]:
    assert served.actor.shared_passes is not None
    return await served.actor.shared_passes.run(requests)


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], atol=1e-5) for name in left
    )


@on_loop
async def test_requests_of_shared_pass_get_their_own_values(
    tiny_gpt2: Path, payloads: dict[str, bytes]
) -> None:
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        names = ["reads", "prints", "edits", "fails", "generates", "reads"]
        squeezed = zstandard.compress(payloads["edits"])
        requests = [
            *(a_request(payloads[name]) for name in names),
            a_request(squeezed, compress=True),
            a_request(b"not zstd", compress=True),
        ]
        responses = await together(served, requests)
        assert [response is None for response in responses] == [
            name not in ("reads", "edits") for name in names
        ] + [
            False,
            True,
        ]
        for name, response in zip([*names, "edits"], responses, strict=False):
            if response is not None:
                assert same(values_of(response), await served.saves(payloads[name]))
                assert response.meta["execution_time"] > 0
                assert [step.name for step in response.steps] == ["prepare", "execute", "pack"]
        # One process served all of them.
        assert len(children(served.zygote)) == 2


@on_loop
async def test_polled_request_of_shared_pass_has_stored_result(
    tiny_gpt2: Path, payloads: dict[str, bytes], tmp_path: Path
) -> None:
    objects = FileStore(tmp_path, 3600)
    async with serve(tiny_gpt2, trusting=SHARING, objects=objects) as served:
        requests = [a_request(payloads["reads"], polled=polled) for polled in (True, False)]
        stored, sent = await together(served, requests)
        assert isinstance(stored.data, StoredResult)
        assert isinstance(sent.data, InlineResult)
        content = await objects.get(result_key(requests[0].id))
        assert content is not None
        # The rows of a pass may differ in their last bits.
        frame = InlineResult(content, sent.data.compressed)
        assert same(values_of(replace(sent, data=frame)), values_of(sent))


@on_loop
async def test_request_with_too_large_result_must_run_alone(
    tiny_gpt2: Path, payloads: dict[str, bytes]
) -> None:
    small = Settings(co_batch=8, max_inline_result_bytes=5_000)
    async with serve(tiny_gpt2, trusting=small) as served:
        responses = await together(served, [a_request(payloads["reads"])] * 2)
        assert responses == [None, None]


@on_loop
async def test_request_with_payload_file_must_run_alone(
    tiny_gpt2: Path, payloads: dict[str, bytes], tmp_path: Path
) -> None:
    file = PayloadFile.create(tmp_path)
    file.append(payloads["reads"])
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        requests = [a_request(payloads["reads"]), a_request(file), a_request(payloads["reads"])]
        responses = await together(served, requests)
        assert [response is None for response in responses] == [False, True, False]


@on_loop
async def test_endless_pass_is_ended_and_its_requests_must_run_alone(
    tiny_gpt2: Path, payloads: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_passes, "_PASS_S", 0.5)
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        requests = [a_request(payloads[name]) for name in ("reads", "holds_it_up", "reads")]
        assert await together(served, requests) == [None] * 3
        assert (await served.run(payloads["reads"])).status is Status.COMPLETED
        served.actor.timeout_s = 1.0
        ended = await served.run(payloads["holds_it_up"])
        assert "longer than 1s" in ended.description


@on_loop
async def test_requests_of_killed_runner_must_run_alone(
    tiny_gpt2: Path, payloads: dict[str, bytes]
) -> None:
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        before = children(served.zygote)
        running = asyncio.create_task(together(served, [a_request(payloads["holds_it_up"])] * 2))
        await eventually(lambda: served.actor.state.runner_pid is not None)
        os.kill(served.actor.state.runner_pid, signal.SIGKILL)
        assert await running == [None, None]
        responses = await together(served, [a_request(payloads["reads"])] * 2)
        assert None not in responses
        assert children(served.zygote) != before


@on_loop
async def test_stopping_replica_ends_its_pass(tiny_gpt2: Path, payloads: dict[str, bytes]) -> None:
    requests = [a_request(payloads["holds_it_up"])] * 2
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        running = asyncio.create_task(together(served, requests))
        await eventually(lambda: served.actor.state.runner_pid is not None)
        zygote = served.zygote
        await served.actor.stop()
        assert await running == [None, None]  # their individual runs then find the replica ended
        assert not alive(zygote)
        with pytest.raises(ReplicaEvictedError):
            await together(served, requests)
    never = a_replica(tiny_gpt2, trusting=SHARING)
    with pytest.raises(ReplicaEvictedError, match="not been started"):
        await together(never, requests)


@on_loop
async def test_killed_process_loses_replica_for_shared_passes(
    tiny_gpt2: Path, payloads: dict[str, bytes]
) -> None:
    async with serve(tiny_gpt2, trusting=SHARING) as served:
        os.kill(served.zygote, signal.SIGKILL)
        await served.actor.ended.wait()
        with pytest.raises(ReplicaLostError):
            await together(served, [a_request(payloads["reads"])] * 2)


@pytest.mark.parametrize(("generation", "most"), [("0.8", 6), ("0.7", 1), ("0.6", 1)])
def test_shared_pass_size_depends_on_generation(
    tiny_gpt2: Path, generation: str, most: int
) -> None:
    async def largest_pass() -> int:
        runtime = Runtime(generation, generation, HERE.interpreter, ())
        passes = a_replica(tiny_gpt2, runtime, trusting=Settings(co_batch=6)).actor.shared_passes
        return 1 if passes is None else passes.most

    assert asyncio.run(largest_pass()) == most


def test_shared_passes_are_off_by_default() -> None:
    assert Settings().co_batch == 1
