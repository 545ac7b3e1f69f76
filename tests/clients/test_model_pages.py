"""Model pages of a server of several processes: real clients use their paths and traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from ndif.gateway.hf_mirror import HfMirror, MirroredModel
from ndif.gateway.model_answers import DescribedModel
from ndif.schema.answer import adapter
from tests.clients.harness import Client, StartedServer, scenarios
from tests.services.redis import RedisServer
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2, make_llama, make_t5
from tests.waiting import until

pytestmark = pytest.mark.engine

TASKS = {
    "tests/gpt2": "text-generation",
    "tests/llama": "text-generation",
    "tests/bert": "fill-mask",
    "tests/t5": "feature-extraction",
}
SERVED = {
    "0.8": [*TASKS],
    "0.7": [name for name, task in TASKS.items() if task == "text-generation"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two text generators, an encoder, and an encoder-decoder."""
    folder = tmp_path_factory.mktemp("pages")
    folders = {
        "tests/gpt2": make_gpt2(folder / "gpt2"),
        "tests/llama": make_llama(folder / "llama"),
        "tests/bert": make_bert(folder / "bert"),
        "tests/t5": make_t5(folder / "t5"),
    }
    (folders["tests/llama"] / "README.md").write_text("---\nlicense: mit\n---\n# A llama\n")
    return folders


@pytest.fixture(scope="module")
def hub(models: dict[str, Path]) -> Iterator[str]:
    """A hub that shares these models."""
    mirror = HfMirror(share_weights=True)
    for name, folder in models.items():
        mirror.serve(MirroredModel(name, folder, None, TASKS[name]))
    with serving(Starlette(routes=[Mount("/hub", routes=mirror.routes())])) as url:
        yield f"{url}/hub"


@pytest.fixture(scope="module")
def server(
    hub: str,
    models: dict[str, Path],
    runtimes: Path,
    redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[StartedServer]:
    """A server whose gateways know models only through the leader."""
    redis.command("flushall")
    folder = tmp_path_factory.mktemp("server")
    environment = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "hf"),
        "NDIF_RUNTIMES_DIR": str(runtimes),
        "NDIF_SESSION_ROOT": str(folder / "sessions"),
        "NDIF_BROKER_URL": redis.url,
        "NDIF_CLUSTER_SECRET": "a secret that the processes share",
        "NDIF_AUTOSCALE_MAX_REPLICAS": "1",
    }
    started = StartedServer(
        "tests/gpt2",
        f"tests/llama={models['tests/llama']}",
        "tests/bert",
        "tests/t5",
        environment=environment,
    )
    try:
        started.ready()
        until(lambda: all(page(started, name)["state"] == "RUNNING" for name in TASKS))
        yield started
    finally:
        started.stop()


def page(server: StartedServer, name: str) -> dict[str, object]:
    status, content = server.get(f"/models/{name}")
    if status != 200:
        return {"state": None}
    description: dict[str, object] = json.loads(content)
    adapter(DescribedModel).validate_python(description)
    return description


@pytest.mark.parametrize("generation", SERVED)
def test_client_confirms_paths_and_traces_of_model_page(
    server: StartedServer,
    models: dict[str, Path],
    runtimes: Path,
    tmp_path: Path,
    generation: str,
) -> None:
    environment = {
        "NDIF_HOST": server.url,
        "HF_ENDPOINT": f"{server.url}/hub",
        "HF_HOME": str(tmp_path),
        "NDIF_API_KEY": "",
    }
    if generation != "0.8":
        environment["PYTHONPATH"] = str(runtimes / generation)
    folder = models["tests/gpt2"].parent
    client = Client("scenarios_model_pages", ",".join(SERVED[generation]), folder, environment)
    try:
        for scenario in scenarios("scenarios_model_pages"):
            client.run(scenario)
    finally:
        client.close()


def test_model_page_shows_facts_of_repository(server: StartedServer, hub: str) -> None:
    llama, gpt2 = page(server, "tests/llama"), page(server, "tests/gpt2")
    assert (llama["license"], llama["card"]) == ("mit", None)
    assert (gpt2["license"], gpt2["card"]) == (None, f"{hub}/tests/gpt2")
    assert gpt2["tokenizer"] is llama["tokenizer"] is True
    assert isinstance(gpt2["load_s"], dict)
    assert gpt2["load_s"]["0.8"] > 0
    assert gpt2["context_length"] == 256


def test_published_state_contains_no_module_tree(server: StartedServer, redis: RedisServer) -> None:
    for name in ("status", "models", "files"):
        published = redis.command("--no-raw", "get", name)
        assert "GPT2Block" not in str(published)
        assert "gpt2" in str(published)


def test_evicted_model_keeps_its_page(server: StartedServer) -> None:
    token = Path(server.environment["NDIF_SESSION_ROOT"], "current", "token").read_text().strip()
    evicted = httpx.post(
        f"{server.url}/admin/evict",
        json={"model": "tests/t5", "cold": True},
        headers={"Authorization": f"Bearer {token}"},
        verify=False,
        trust_env=False,
    )
    assert evicted.status_code == 200, evicted.text
    until(lambda: page(server, "tests/t5")["state"] == "NOT DEPLOYED")
    assert page(server, "tests/t5")["tree"] is not None


def test_page_of_unknown_model_answers_404(server: StartedServer) -> None:
    answer = httpx.get(f"{server.url}/models/no/model", verify=False, trust_env=False)
    assert answer.status_code == 404
    assert "This server does not know 'no/model'" in answer.json()["detail"]
