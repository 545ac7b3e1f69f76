"""Sizes of models, measured by real processes and compared with loaded models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from huggingface_hub import HfApi
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Mount, Route
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.host.evaluation import EvaluationError, Evaluator
from ndif.host.fork_server import ForkServers
from ndif.host.hub import download
from ndif.host.runtimes import Runtime
from ndif.runtime.process.fork_server import OPTION
from ndif.runtime.spec import ModelSpec
from ndif.schema.deployment import DeploymentConfig
from tests.conftest import NAME
from tests.on_loop import on_loop
from tests.processes import children
from tests.runtime.replica import (
    HERE,
    alive,
    fork_servers,
)
from tests.runtime.weights.hub_with_refs import History, HubWithRefs
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2, make_llama, make_t5
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.slow]

KINDS: dict[str, tuple[Callable[[Path], Path], str, Any]] = {
    "gpt2": (make_gpt2, "text-generation", AutoModelForCausalLM),
    "llama": (make_llama, "text-generation", AutoModelForCausalLM),
    "bert": (make_bert, "fill-mask", AutoModelForMaskedLM),
    "t5": (make_t5, "feature-extraction", AutoModel),
}


@contextlib.asynccontextmanager
async def an_evaluator(**given: Any) -> AsyncIterator[Evaluator]:
    evaluator = Evaluator(fork_servers=await fork_servers(untrusted=True), **given)
    try:
        yield evaluator
    finally:
        await evaluator.stop()
        # A process that is forked only now ends when it finds no caller.
        await eventually(lambda: processes() == [])


@contextlib.asynccontextmanager
async def some_servers() -> AsyncIterator[ForkServers]:
    """A fork server in an environment that this test changed."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    servers = ForkServers()
    servers.prepare(HERE, untrusted=True)
    yield servers
    servers.stop()


def processes(parent: int | None = None) -> list[int]:
    """The evaluating processes that this one started, itself or by a fork server."""
    pids = []
    for pid in children(parent or os.getpid()):
        command = command_of(pid)
        if OPTION in command:
            pids += processes(pid)
        elif "ndif.runtime.measure" in command:
            pids.append(pid)
    return pids


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def a_config(checkpoint: Path | str, **given: Any) -> DeploymentConfig:
    return DeploymentConfig("test/model", str(checkpoint), **{"padding_factor": 0.0, **given})


def loaded(folder: Path, kind: Any, dtype: str) -> tuple[int, int]:
    """Bytes and parameters of the model itself."""
    model = kind.from_pretrained(folder, dtype=dtype)
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", KINDS)
@on_loop
async def test_measured_sizes_match_loaded_models(name: str, tmp_path: Path) -> None:
    make, task, kind = KINDS[name]
    folder = make(tmp_path / name)
    truth = {dtype: loaded(folder, kind, dtype) for dtype in ("float32", "bfloat16")}
    # T5 keeps a part of it in float32.
    truth["float16"] = loaded(folder, kind, "float16")
    truth["auto"] = truth["float32"]
    async with an_evaluator() as evaluate:
        configs = [a_config(folder, dtype=dtype, task=task) for dtype in truth]
        answers = await asyncio.gather(*(evaluate(config, HERE) for config in configs))
        for (dtype, expected), evaluation in zip(truth.items(), answers, strict=True):
            assert (evaluation.size_bytes, evaluation.parameters) == expected, dtype
            assert (evaluation.task, evaluation.repo_id) == (task, None)
            assert evaluation.structure is not None
            size_and_count = evaluation.structure.bytes, evaluation.structure.tree.count
            assert size_and_count == expected, "its structure tells of the same model"
            assert evaluation.structure.tokenizer
        # Without a task, the architecture decides.
        assert (await evaluate(a_config(folder), HERE)).task == task
        assert processes() == []


@on_loop
async def test_auto_dtype_follows_config_then_weight_files(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    kind = AutoModelForCausalLM
    kind.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    half, _ = loaded(tmp_path / "model", kind, "bfloat16")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("dtype") == "bfloat16"
    async with an_evaluator() as evaluate:
        assert (await evaluate(a_config(tmp_path / "model"), HERE)).size_bytes == half
        # Without a dtype in the config, the weight files decide.
        silent = shutil.copytree(tmp_path / "model", tmp_path / "silent")
        (silent / "config.json").write_text(json.dumps(config))
        assert loaded(silent, kind, "auto")[0] == half
        assert (await evaluate(a_config(silent), HERE)).size_bytes == half
        none = shutil.copytree(silent, tmp_path / "none")
        (none / "model.safetensors").unlink()
        whole, _ = loaded(tmp_path / "model", kind, "float32")
        assert (await evaluate(a_config(none), HERE)).size_bytes == whole


@on_loop
async def test_padding_is_added_to_size(tiny_gpt2: Path) -> None:
    async with an_evaluator() as evaluate:
        bare = (await evaluate(a_config(tiny_gpt2), HERE)).size_bytes
        padded = a_config(tiny_gpt2, padding_factor=0.5, padding_bytes=7)
        assert (await evaluate(padded, HERE)).size_bytes == -(-bare * 3 // 2) + 7


@on_loop
async def test_concurrent_measurements_share_one_process_and_cached_result(tiny_gpt2: Path) -> None:
    async with an_evaluator() as evaluate:
        asked = [
            asyncio.create_task(evaluate(a_config(tiny_gpt2, task="text-generation"), HERE))
            for _ in range(3)
        ]
        await eventually(lambda: len(processes()) == 1)
        # A cancelled caller does not affect the others.
        asked[0].cancel()
        assert len(processes()) == 1
        first, second = await asyncio.gather(*asked[1:])
        assert first == second
        # The result is cached; no process is needed.
        assert processes() == []
        assert await evaluate(a_config(tiny_gpt2, task="text-generation"), HERE) == first
        assert processes() == []


@on_loop
async def test_failures_have_clear_messages_and_are_not_cached(
    tiny_gpt2: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    async with an_evaluator() as evaluate:
        with pytest.raises(EvaluationError, match=r"holds no config\.json"):
            await evaluate(a_config(folder), HERE)
        shutil.copytree(tiny_gpt2, folder, dirs_exist_ok=True)
        assert (await evaluate(a_config(folder), HERE)).size_bytes > 0
        with pytest.raises(EvaluationError, match="no dtype 'float12'"):
            await evaluate(a_config(folder, dtype="float12"), HERE)
        with pytest.raises(EvaluationError, match="no task 'dreaming'"):
            await evaluate(a_config(folder, task="dreaming"), HERE)
        own = json.loads((folder / "config.json").read_text())
        own["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
        own["model_type"] = "own"
        (folder / "config.json").write_text(json.dumps(own))
        with pytest.raises(EvaluationError, match="deploy it with trust_remote_code"):
            await evaluate(a_config(folder, dtype="float64"), HERE)


@on_loop
async def test_task_unsupported_by_generation_is_rejected(tiny_gpt2: Path) -> None:
    old = Runtime("0.7", "0.7", HERE.interpreter, ())
    async with an_evaluator() as evaluate:
        with pytest.raises(EvaluationError, match=r"0\.7 serves text generation only"):
            await evaluate(a_config(tiny_gpt2, task="fill-mask"), old)


@on_loop
async def test_killed_measurement_is_retried_once(tiny_gpt2: Path) -> None:
    async with an_evaluator() as evaluate:
        asked = asyncio.create_task(evaluate(a_config(tiny_gpt2), HERE))
        await eventually(lambda: len(processes()) == 1)
        # The first kill is retried: another model may have caused it.
        [first] = processes()
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: processes() not in ([], [first]))
        os.kill(processes()[0], signal.SIGKILL)
        with pytest.raises(EvaluationError, match="ended"):
            await asked
        again = asyncio.create_task(evaluate(a_config(tiny_gpt2), HERE))
        await eventually(lambda: len(processes()) == 1)
        os.kill(processes()[0], signal.SIGKILL)
        assert (await again).size_bytes > 0


@on_loop
async def test_slow_hub_does_not_delay_other_measurements(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for.set()
        await reader.read()
        writer.close()

    hub = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    port = hub.sockets[0].getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    async with hub, some_servers() as servers:
        evaluate = Evaluator(fork_servers=servers)
        await evaluate(a_config(tiny_gpt2, dtype="bfloat16"), HERE)
        slow = asyncio.create_task(evaluate(a_config(NAME), HERE))
        await asked_for.wait()
        assert (await evaluate(a_config(tiny_gpt2), HERE)).size_bytes > 0
        assert not slow.done()
        await evaluate.stop()


@on_loop
async def test_pending_measurement_fails_when_evaluator_stops(tiny_gpt2: Path) -> None:
    async with an_evaluator() as evaluate:
        asked = asyncio.create_task(evaluate(a_config(tiny_gpt2), HERE))
        await eventually(lambda: len(processes()) == 1)
        await evaluate.stop()
        with pytest.raises(EvaluationError, match="stopping"):
            await asked


SERVER = """
import asyncio, sys
from pathlib import Path
from ndif.host.evaluation import Evaluator
from ndif.host.fork_server import ForkServers
from ndif.host.runtimes import Runtime
from ndif.schema.deployment import DeploymentConfig

async def main():
    evaluate = Evaluator()
    runtime = Runtime("0.8", "0.8", Path(sys.executable), ())
    await evaluate(DeploymentConfig("test/model", sys.argv[1]), runtime)

asyncio.run(main())
"""


@on_loop
async def test_measuring_process_ends_with_server(tiny_gpt2: Path) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, str(tiny_gpt2))
    await eventually(lambda: processes(server.pid) != [])
    [pid] = processes(server.pid)
    assert alive(pid)
    server.kill()
    await server.wait()
    await eventually(lambda: not alive(pid))


@on_loop
async def test_task_follows_architecture_not_model_card(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub = HfMirror(share_weights=True)
    hub.serve(MirroredModel("test-org/other", tiny_gpt2, None, "feature-extraction"))
    with serving(Starlette(routes=[Mount("/hub", routes=hub.routes())])) as url:
        monkeypatch.setenv("HF_ENDPOINT", f"{url}/hub")
        async with some_servers() as servers:
            evaluate = Evaluator(fork_servers=servers)
            assert (await evaluate(a_config("test-org/other"), HERE)).task == "text-generation"


@on_loop
async def test_repository_is_measured_without_weights_and_offline_from_cache(
    tiny_gpt2: Path, hub_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub_url)
    async with some_servers() as servers:
        evaluate = Evaluator(fork_servers=servers)
        folder = await evaluate(a_config(tiny_gpt2), HERE)
        evaluation = await evaluate(a_config(NAME), HERE)
        assert evaluation.size_bytes == folder.size_bytes
        assert (evaluation.task, evaluation.repo_id) == ("text-generation", NAME)
        assert not list((tmp_path / "home").rglob("*.safetensors"))
        host = urlsplit(hub_url).netloc
        with pytest.raises(EvaluationError, match=f"no repository 'test-org/nothing' on {host}"):
            await evaluate(a_config("test-org/nothing"), HERE)
        # A repository that was read once is in the cache, for times without a hub.
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        evaluate = Evaluator(fork_servers=servers)
        offline = await evaluate(a_config(NAME), HERE)
        assert offline.size_bytes == folder.size_bytes
        assert (offline.task, offline.repo_id) == ("text-generation", None)
        with pytest.raises(EvaluationError, match="not in this machine's cache"):
            await evaluate(a_config("test-org/nothing"), HERE)


@on_loop
async def test_commit_of_pull_request_is_recognized(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, refs = HfMirror(share_weights=True), HubWithRefs()
    honest, pulled = "test-org/honest", "test-org/pulled"
    for name in (honest, pulled):
        mirror.serve(MirroredModel(name, tiny_gpt2, None, "text-generation"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(refs.app(*mirror.routes())) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        commit = str(HfApi(endpoint=url).model_info(honest).sha)
        refs.histories[honest] = History({"main": ["0" * 40, commit]})
        refs.histories[pulled] = History({"main": ["0" * 40]})
        async with some_servers() as servers:
            evaluate = Evaluator(fork_servers=servers)
            assert (await evaluate(a_config(pulled), HERE)).on_branch
            measured = await evaluate(a_config(pulled, revision=commit), HERE)
            assert not measured.on_branch
            assert measured.size_bytes > 0, "an operator may deploy it"
            assert (await evaluate(a_config(honest, revision=commit), HERE)).on_branch
            await download(ModelSpec(honest, "0.8", commit), HERE, lambda _, __: None)
    # Without the hub, a commit that was loaded before is accepted; of the other one only a config is here.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with some_servers() as servers:
        evaluate = Evaluator(fork_servers=servers)
        assert (await evaluate(a_config(honest, revision=commit), HERE)).on_branch
        with pytest.raises(EvaluationError, match="not in this machine's cache"):
            await evaluate(a_config(pulled, revision=commit), HERE)


@pytest.mark.parametrize(
    ("reply", "is_gated"),
    [
        ({}, False),
        ({"gated": "manual", "tags": ["transformers", "license:llama3.1"]}, True),
        ({"private": True}, True),
    ],
)
@on_loop
async def test_gated_and_private_repositories_are_reported_as_gated(
    hub_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reply: dict[str, Any],
    is_gated: bool,
) -> None:
    async def answer(http: HttpRequest) -> HttpResponse:
        """Forward a request, and add `said` to the hub's facts about the model."""
        asked = {name: http.headers[name] for name in ("range",) if name in http.headers}
        async with httpx.AsyncClient() as client:
            url = f"{hub_url}{http.url.path}"
            upstream = await client.request(
                http.method, url, params=http.query_params, headers=asked
            )
        if http.url.path.startswith("/api/models/"):
            return JSONResponse({**upstream.json(), **reply})
        return HttpResponse(upstream.content, upstream.status_code, upstream.headers)

    hub = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "HEAD"])])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(hub) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        async with some_servers() as servers:
            evaluation = await Evaluator(fork_servers=servers)(a_config(NAME), HERE)
            # A download reports the same, for a leader that has not measured the model.
            loaded_from = await download(ModelSpec(NAME, "0.8"), HERE, lambda _, __: None)
    assert evaluation.gated is loaded_from.gated is is_gated
    assert evaluation.structure is not None
    assert evaluation.structure.license == ("llama3.1" if "tags" in reply else None)
    assert evaluation.structure.tokenizer, "which is not in what was measured"
    assert evaluation.size_bytes > 0


@on_loop
async def test_measurement_looks_for_cuda_only_if_configured(tmp_path: Path) -> None:
    config = DeploymentConfig("a/b", str(make_gpt2(tmp_path / "model")))
    async with an_evaluator() as evaluator:
        assert (await evaluator(config, HERE)).cuda is None
    looking = Evaluator(fork_servers=await fork_servers(), look_for_cuda=True)
    assert (await looking(config, HERE)).cuda is torch.cuda.is_available()
    await looking.stop()
