"""`GET /models/{repo_id}`: known models and their descriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from ndif.cluster.models import Model, Models
from ndif.cluster.status import describe_details
from ndif.gateway.http_error import EXCEPTION_HANDLERS
from ndif.gateway.model_answers import DescribedModel
from ndif.gateway.model_pages import ModelRoutes, _shown_address
from ndif.host.runtimes import Runtimes
from ndif.runtime.structure import describe_structure
from ndif.schema.answer import adapter
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.model_key import ModelKey
from ndif.schema.structure import ModelDetails, ModelStructure, read_structure
from tests.gateway.catalogue import KnownCatalogue
from tests.on_loop import on_loop
from tests.tiny_models import make_bert, make_gpt2

pytestmark = pytest.mark.process

GPT2, BERT = "org/gpt2", "org/bert"


class Asked(KnownCatalogue):
    """A catalogue that records the requested models."""

    keys: list[ModelKey] = []  # noqa: RUF012 - cleared by each server

    async def details(self, key: ModelKey) -> ModelDetails:
        self.keys.append(key)
        await asyncio.sleep(0)
        return await super().details(key)


@pytest.fixture(scope="module")
def structures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelStructure]:
    """The structures of a GPT-2 and of a BERT."""
    folder = tmp_path_factory.mktemp("models")
    structure_by_name = {}
    for name, make, kind in (
        (GPT2, make_gpt2, AutoModelForCausalLM),
        (BERT, make_bert, AutoModelForMaskedLM),
    ):
        of = make(folder / name)
        structure = read_structure(describe_structure(kind.from_pretrained(of), of))
        assert structure is not None
        structure_by_name[name] = structure
    return structure_by_name


def application(models: Models, runtimes: Path, status: dict[str, Any] | None = None) -> Starlette:
    """Return an application that lists the models of `status`, or each one."""
    entries = {str(model.config.key): entry_of(model) for model in models}
    listed = entries if status is None else status
    Asked.keys.clear()
    catalogue = Asked(models, listed)
    routes = ModelRoutes(catalogue, Runtimes(runtimes), "https://ndif.example.org", None).routes()
    return Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)


def entry_of(model: Model) -> dict[str, Any]:
    return {
        "model_key": str(model.config.key),
        "repo_id": model.config.repo_id,
        "revision": model.config.key.revision,
        "task": model.config.task,
        "trust_remote_code": False,
        "on_demand": False,
        "deployment_level": "HOT",
        "application_state": "RUNNING",
        "state": "RUNNING",
        "nodes": [],
        "config": None,
        "runtimes": {"0.8": "RUNNING"},
        "replicas": {"0.8": 1},
        "parameters": 7,
        "dedicated": True,
    }


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", trust_env=False
    )


async def ask(app: Starlette, path: str, status: int = 200) -> dict[str, Any]:
    async with client_of(app) as http:
        answer = await http.get(path)
    assert answer.status_code == status, answer.text
    document: dict[str, Any] = answer.json()
    if status == 200:
        adapter(DescribedModel).validate_python(document)
    else:
        assert document.keys() == {"detail"}
    return document


def modules(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree["children"]:
        yield from modules(child)


@on_loop
async def test_model_page_describes_every_generation(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(GPT2, GPT2, task="text-generation", dedicated=True)])
    (model,) = models
    model.structures["0.8"], model.load_s["0.8"] = structures[GPT2], 1.5
    app = application(models, runtimes)
    facts = await ask(app, f"/models/{GPT2}")
    assert (facts["license"], facts["card"]) == (None, f"https://huggingface.co/{GPT2}")
    assert (facts["state"], facts["load_s"], facts["layers"]) == ("RUNNING", {"0.8": 1.5}, 4)
    assert facts["generations"][:2] == ["0.8", "0.7"]
    assert facts["adapters"] == ["0.8"]
    blocks = [module for module in modules(facts["tree"]) if module["number"] == 4]
    assert [(module["class"], module["indices"]) for module in blocks] == [("GPT2Block", [[0, 3]])]
    for generation, kind in (("0.8", "TransformersModel"), ("0.7", "LanguageModel")):
        assert blocks[0]["paths"][generation] == "model.transformer.h[0]"
        text = facts["snippets"][generation]
        assert "hidden = model.transformer.h[1].output.save()" in text
        assert f'model = {kind}("{GPT2}"' in text
        assert 'os.environ["NDIF_HOST"] = "https://ndif.example.org"' in text
    assert (await ask(app, f"/models/{GPT2.upper()}"))["repo_id"] == GPT2


@on_loop
async def test_page_of_encoder_describes_only_generations_that_serve_it(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(BERT, "/a/folder", task="fill-mask")])
    (model,) = models
    model.structures["0.8"] = structures[BERT]
    facts = await ask(application(models, runtimes), f"/models/{BERT}")
    assert facts["snippets"].keys() == {"0.8"}
    assert facts["tree"]["paths"] == {"0.8": "model"}
    assert facts["card"] is None, "a folder of the server's is nobody's business"
    assert "/a/folder" not in str(facts)
    moved = [module for module in modules(facts["tree"]) if module["name"] == "output"]
    assert all(module["paths"]["0.8"].endswith(".E_output") for module in moved)


@on_loop
async def test_generations_that_load_different_models_have_separate_trees(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(GPT2, GPT2)])
    (model,) = models
    model.structures.update({"0.8": structures[BERT], "0.7": structures[GPT2]})
    app = application(models, runtimes)
    newest = await ask(app, f"/models/{GPT2}")
    assert (newest["generation"], newest["tree"]["class"]) == ("0.8", "BertForMaskedLM")
    assert newest["tree"]["paths"].keys() == {"0.8"}
    older = await ask(app, f"/models/{GPT2}?generation=0.7")
    assert (older["generation"], older["tree"]["class"]) == ("0.7", "GPT2LMHeadModel")
    # 0.6 has loaded none, and 0.7's is of the kind that it loads.
    assert older["tree"]["paths"].keys() == {"0.7", "0.6"}


@on_loop
async def test_each_revision_has_its_own_page(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(GPT2, GPT2, "v2"), DeploymentConfig(GPT2, GPT2)])
    second, first = models
    first.structures["0.8"] = second.structures["0.8"] = structures[GPT2]
    app = application(models, runtimes)
    assert (await ask(app, f"/models/{GPT2}"))["revision"] is None
    assert (await ask(app, f"/models/{GPT2}?revision=main"))["revision"] is None
    facts = await ask(app, f"/models/{GPT2}?revision=v2")
    assert facts["revision"] == "v2"
    assert 'revision="v2"' in facts["snippets"]["0.7"]
    assert facts["card"] == f"https://huggingface.co/{GPT2}/tree/v2"
    assert "at revision 'v3'" in (await ask(app, f"/models/{GPT2}?revision=v3", 404))["detail"]


@pytest.mark.parametrize("revision", ["..%5C..%5Cmade5", "a%20b", "%00"])
@on_loop
async def test_malformed_revision_is_refused(runtimes: Path, revision: str) -> None:
    app = application(Models([DeploymentConfig(GPT2, GPT2)]), runtimes)
    refused = await ask(app, f"/models/{GPT2}?revision={revision}", 400)
    assert "must be a branch, a tag or a commit" in refused["detail"]


@on_loop
async def test_model_without_tree_has_page(runtimes: Path) -> None:
    facts = await ask(
        application(Models([DeploymentConfig(GPT2, GPT2)]), runtimes), f"/models/{GPT2}"
    )
    assert (facts["tree"], facts["generation"], facts["snippets"]) == (None, None, {})
    assert facts["parameters"] == 7


@on_loop
async def test_model_only_in_calendar_has_page(runtimes: Path) -> None:
    to_come = Model(ModelKey("A", GPT2), DeploymentConfig(GPT2, GPT2))
    app = application(Models(), runtimes, {"a": entry_of(to_come)})
    assert (await ask(app, f"/models/{GPT2}"))["repo_id"] == GPT2
    await ask(app, "/models/org/other", 404)


@on_loop
async def test_on_demand_model_has_page_unless_gated_or_unmeasured(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models()
    measured, secret, unmeasured = (
        Model(ModelKey("A", name), DeploymentConfig(name, name), on_demand=True)
        for name in ("org/measured", "org/secret", "org/unmeasured")
    )
    secret.gated = True
    for model in (measured, secret, unmeasured):
        models.add(model)
    measured.structures["0.8"] = secret.structures["0.8"] = structures[GPT2]
    app = application(models, runtimes, {})
    facts = await ask(app, "/models/org/measured")
    assert (facts["state"], facts["deployment_level"]) == ("NOT DEPLOYED", "COLD")
    unknown = await ask(app, "/models/org/secret", 404)
    assert unknown["detail"].startswith("This server does not know 'org/secret':")
    await ask(app, "/models/org/unmeasured", 404)


@on_loop
async def test_concurrent_page_requests_ask_leader_once(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(GPT2, GPT2)])
    (model,) = models
    model.structures["0.8"] = structures[GPT2]
    app = application(models, runtimes)
    await asyncio.gather(*(ask(app, f"/models/{GPT2}") for _ in range(20)))
    assert Asked.keys == [model.key]
    # Unknown names do not reach the leader.
    await asyncio.gather(*(ask(app, f"/models/org/n{n}", 404) for n in range(20)))
    assert Asked.keys == [model.key]


@on_loop
async def test_page_shows_tree_as_soon_as_model_is_loaded(
    structures: dict[str, ModelStructure], runtimes: Path
) -> None:
    models = Models([DeploymentConfig(GPT2, GPT2)])
    (model,) = models
    loading = entry_of(model) | {"runtimes": {"0.8": "DEPLOYING"}}
    status = {str(model.config.key): loading}
    app = application(models, runtimes, status)
    assert (await ask(app, f"/models/{GPT2}"))["tree"] is None
    model.structures["0.8"] = structures[GPT2]
    status[str(model.config.key)] = loading | {"runtimes": {"0.8": "RUNNING"}}
    assert (await ask(app, f"/models/{GPT2}"))["tree"] is not None


@on_loop
async def test_any_model_name_is_answered(runtimes: Path) -> None:
    app = application(Models([DeploymentConfig(GPT2, GPT2)]), runtimes)
    for name in ("", "a", "a/b/c", "%00", "..%2f..%2fetc", "%3Cimg%20src=x%3E", "x" * 5000, "%ff"):
        detail = (await ask(app, f"/models/{name}", 404))["detail"]
        assert len(detail) < 600
    await ask(app, f"/models/{GPT2}?generation=%00&revision=", 200)


def test_details_of_removed_model_are_empty() -> None:
    nothing = ModelDetails(structures={}, load_s={})
    assert describe_details(Models(), ModelKey("A", GPT2)) == nothing


def test_hub_address_is_shown_without_password() -> None:
    assert (
        _shown_address("https://user:secret@hub.example:8443/hf/") == "https://hub.example:8443/hf"
    )
    for endpoint in (None, "", "javascript:alert(1)", "file:///etc", "http://[", "hub.example"):
        assert _shown_address(endpoint) is None
