"""A model's page in a real browser: its tree, its search, its keys, and an author who means ill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, XmodConfig

from ndif.cluster.models import Models
from ndif.config.settings import Settings
from ndif.control.operations import Answer
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import create_app
from ndif.gateway.catalogue import InProcessCatalogue
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.model_pages import ModelRoutes
from ndif.gateway.open_channels import OpenChannels
from ndif.host.runtimes import Runtimes
from ndif.runtime.structure import describe_structure
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.structure import ModelStructure, read_structure
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from tests.gateway.test_model_pages import entry_of
from tests.services.packages import need
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2

GPT2, BERT, EVIL = "tests/gpt2", "tests/bert", "tests/evil"
HOSTILE = "<img src=x onerror=alert(1)>"
PHONE = {"width": 390, "height": 844}


def structure_of(module: Any, folder: Path) -> ModelStructure:
    found = read_structure(describe_structure(module, folder))
    assert found is not None
    return found


def evil() -> Any:
    """Return a model whose config names a module, and whose code names a class."""
    config = XmodConfig(is_decoder=True, languages=[HOSTILE, "en_XX"], num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    hostile = type(HOSTILE, (torch.nn.Module,), {})
    model.add_module(HOSTILE, hostile())
    return model


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, runtimes: Path) -> Iterator[str]:
    """A server that knows three models, which no process has loaded."""
    folder = tmp_path_factory.mktemp("models")
    tasks = {GPT2: "text-generation", BERT: "fill-mask", EVIL: None, "tests/new": None}
    models = Models([DeploymentConfig(name, name, task=task) for name, task in tasks.items()])
    gpt2, bert = make_gpt2(folder / "gpt2"), make_bert(folder / "bert")
    structures = {
        GPT2: structure_of(AutoModelForCausalLM.from_pretrained(gpt2), gpt2),
        BERT: structure_of(AutoModelForMaskedLM.from_pretrained(bert), bert),
        EVIL: structure_of(evil(), folder),
    }
    for model in models:
        if (known := structures.get(model.config.repo_id)) is not None:
            model.structures["0.8"], model.load_s["0.8"] = known, 3.2
    with serving(application(models, runtimes)) as address:
        yield address


def application(models: Models, runtimes: Path) -> Starlette:
    settings = Settings(runtimes_dir=runtimes)
    status = {"deployments": {str(each.config.key): entry_of(each) for each in models}}
    catalogue = InProcessCatalogue(models, lambda: status, lambda: True)
    installed = Runtimes(runtimes)

    async def state(seen: str, users: Any) -> Answer:
        if seen:  # nothing changes
            await asyncio.sleep(3600)
        return {"name": "1", "state": {}, "jobs": {}}

    board = Dashboard(
        settings, OpenAccounts(hotswapping=True), installed, state, host="127.0.0.1", places=True
    )
    return create_app(  # type: ignore[return-value]
        [*ModelRoutes(catalogue, installed, "", None).routes(), *board.routes()],
        SocketIoSubscriptions(MemoryBroker(), OpenChannels(settings), settings),
        HfMirror(share_weights=False),
        None,  # type: ignore[arg-type]
        settings,
        host="127.0.0.1",
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=need("chromium", "chromium"), args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@pytest.fixture
def said() -> list[str]:
    """Errors, and dialogues, of a page."""
    return []


@pytest.fixture
def page(browser: Browser, url: str, said: list[str]) -> Iterator[Page]:
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened = context.new_page()

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(message.text)

    opened.on("console", note)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append(dialog.message))
    yield opened
    context.close()


def show(page: Page, name: str) -> None:
    page.goto(f"/#/model/{name}")
    page.get_by_role("tree").wait_for()


def labels(page: Page) -> list[str]:
    """Return the paths and classes of the modules that are shown."""
    items = page.get_by_role("treeitem").all()
    return [item.get_attribute("aria-label") or "" for item in items]


def test_the_page_has_the_tree_the_facts_and_a_trace(page: Page, said: list[str]) -> None:
    show(page, GPT2)
    assert page.title() == f"{GPT2} · ndif"
    assert "model.transformer.h[0], GPT2Block" in labels(page)
    blocks = page.get_by_role("treeitem", name="model.transformer.h[0], GPT2Block")
    assert "4 alike" in blocks.first.inner_text()
    figures = page.get_by_label("Figures").inner_text()
    assert "Vocabulary" in figures
    assert "last load 3.2 s" in page.locator("#served").inner_text()
    trace = page.locator("#trace")
    assert "TransformersModel" in trace.inner_text()
    trace.get_by_text("nnsight 0.7").click()
    page.get_by_text("as nnsight 0.7 names them").wait_for()
    assert f'LanguageModel("{GPT2}")' in trace.inner_text()
    card = page.get_by_role("link", name=f"https://huggingface.co/{GPT2}")
    assert card.get_attribute("href") == f"https://huggingface.co/{GPT2}"
    assert said == []


def test_a_path_is_copied_also_of_another_block(page: Page, said: list[str]) -> None:
    show(page, GPT2)
    row = page.get_by_role("treeitem", name="model.transformer.h[0].mlp, GPT2MLP")
    row.locator("> .module").hover()
    row.get_by_role("button", name="Copy the path model.transformer.h[0].mlp", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()") == "model.transformer.h[0].mlp"
    row.locator("> .module .module-name").click()
    page.get_by_role("spinbutton").fill("3")
    chosen = page.locator(".chosen-module")
    assert "saved = model.transformer.h[3].mlp.output.save()" in chosen.inner_text()
    assert "model.transformer.h[3].mlp.c_fc, Conv1D" in labels(page)
    page.get_by_role("spinbutton").fill("99")
    assert "model.transformer.h[3].mlp.output" in chosen.inner_text()
    assert said == []


def test_modules_are_searched(page: Page) -> None:
    show(page, GPT2)
    search = page.get_by_role("searchbox")
    search.fill("layernorm")
    page.get_by_text("3 matches").wait_for()
    shown = labels(page)
    assert {label.rpartition(", ")[2] for label in shown} == {
        *("GPT2LMHeadModel", "GPT2Model", "ModuleList", "GPT2Block", "LayerNorm")
    }
    search.fill("no such thing")
    page.get_by_text("0 matches").wait_for()
    search.fill("")
    page.get_by_role("button", name="Expand all").click()
    assert "model.transformer.h[0].attn.c_attn, Conv1D" in labels(page)
    page.get_by_role("button", name="Collapse all").click()
    assert labels(page)[1:] == ["model.transformer, GPT2Model", "model.lm_head, Linear"]


def test_the_tree_is_walked_by_keyboard(page: Page) -> None:
    show(page, GPT2)
    page.get_by_role("button", name="Expand all").focus()
    page.keyboard.press("Tab")

    def focused() -> str | None:
        return page.evaluate("document.activeElement.getAttribute('aria-label')")  # type: ignore[no-any-return]

    assert focused() == "model, GPT2LMHeadModel"
    page.keyboard.press("ArrowRight")
    assert focused() == "model.transformer, GPT2Model"
    page.keyboard.press("ArrowLeft")  # closes it
    page.keyboard.press("ArrowDown")
    assert focused() == "model.lm_head, Linear"
    page.keyboard.press("Home")
    page.keyboard.press("t")
    assert focused() == "model.transformer, GPT2Model"
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    assert focused() == "model.lm_head, Linear"
    page.keyboard.press("ArrowLeft")
    assert focused() == "model, GPT2LMHeadModel"
    page.keyboard.press("Tab")
    assert focused() == "Copy the path model"


def test_values_that_have_another_name_are_told(page: Page) -> None:
    show(page, BERT)
    page.get_by_role("searchbox").fill("BertOutput")
    moved = page.get_by_role("treeitem", name="model.bert.encoder.layer[0].E_output, BertOutput")
    moved.locator("> .module").click()
    assert "model.bert.encoder.layer[0].E_output.output.save()" in (
        page.locator(".chosen-module").inner_text()
    )
    assert page.locator("#trace").get_by_text("nnsight 0.7").count() == 0


def test_names_of_a_repository_are_text(page: Page, said: list[str]) -> None:
    show(page, EVIL)
    page.get_by_role("button", name="Expand all").click()
    shown = page.get_by_role("tree").inner_text()
    assert f'.get("{HOSTILE}")' in shown
    assert shown.count(HOSTILE) >= 3  # a module of the config's, and one with its class
    page.get_by_role("treeitem", name=f'model.get("{HOSTILE}"), {HOSTILE}').locator(
        "> .module"
    ).click()
    assert HOSTILE in page.locator(".chosen-module h3").inner_text()
    assert page.locator("img").count() == 0
    assert said == []


def test_what_is_not_known_is_said(page: Page) -> None:
    page.goto("/#/model/tests/new")
    page.get_by_text("They are known once the model was measured").wait_for()
    page.goto("/#/model/no/model")
    page.get_by_text("This server does not know 'no/model'").wait_for()
    page.goto(f"/#/model/{json.dumps(HOSTILE)}")
    page.get_by_text("This server does not know").wait_for()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_for_everybody(browser: Browser, url: str, theme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    for viewport in ({"width": 1280, "height": 900}, PHONE):
        # A page's own policy keeps a tester's script out.
        context = browser.new_context(
            base_url=url, viewport=viewport, color_scheme=theme, bypass_csp=True
        )
        page = context.new_page()
        show(page, GPT2)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= viewport["width"]
        found = Axe().run(page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert serious == [], json.dumps(serious, indent=1)[:4000]
        context.close()
