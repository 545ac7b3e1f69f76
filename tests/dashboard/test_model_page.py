"""The page of a model in a real browser: tree, search, keyboard, and hostile names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from playwright.sync_api import Browser, Page, expect
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, XmodConfig

from ndif.cluster.models import Models
from ndif.config.settings import Settings
from ndif.dashboard.dashboard import Dashboard
from ndif.gateway.app import create_app
from ndif.gateway.header_wire import SocketIoSubscriptions
from ndif.gateway.hf_mirror import HfMirror
from ndif.gateway.model_pages import ModelRoutes
from ndif.gateway.open_channels import OpenChannels
from ndif.host.runtimes import Runtimes
from ndif.runtime.structure import describe_structure
from ndif.schema.deployment import DeploymentConfig
from ndif.schema.public_state import JobHistory, NextState, PublicState
from ndif.schema.structure import ModelStructure, read_structure
from ndif.stores.accounts import OpenAccounts
from ndif.stores.broker import MemoryBroker
from tests.dashboard.browser import DESKTOP, PHONE, check_access, chromium, visiting
from tests.gateway.catalogue import KnownCatalogue
from tests.gateway.test_model_pages import entry_of
from tests.services.packages import need
from tests.serving import serving
from tests.tiny_models import make_bert, make_gpt2

pytestmark = pytest.mark.process

GPT2, BERT, EVIL = "tests/gpt2", "tests/bert", "tests/evil"
HOSTILE = "<img src=x onerror=alert(1)>"


def structure_of(module: Any, folder: Path) -> ModelStructure:
    structure = read_structure(describe_structure(module, folder))
    assert structure is not None
    return structure


def evil() -> Any:
    """Return a model with a hostile module name from its config and a hostile class name."""
    config = XmodConfig(is_decoder=True, languages=[HOSTILE, "en_XX"], num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    hostile = type(HOSTILE, (torch.nn.Module,), {})
    model.add_module(HOSTILE, hostile())
    return model


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, runtimes: Path) -> Iterator[str]:
    """The URL of a server with four known models, none of them loaded."""
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
        if (known_structure := structures.get(model.config.repo_id)) is not None:
            model.structures["0.8"], model.load_s["0.8"] = known_structure, 3.2
    with serving(application(models, runtimes)) as address:
        yield address


def application(models: Models, runtimes: Path) -> Starlette:
    settings = Settings(runtimes_dir=runtimes)
    entries = {str(model.config.key): entry_of(model) for model in models}
    catalogue = KnownCatalogue(models, entries)
    installed = Runtimes(runtimes)

    async def state(seen: str, users: Any) -> NextState:
        if seen:  # nothing changes
            await asyncio.Event().wait()
        nothing = PublicState(
            models=[],
            nodes=[],
            problems=[],
            schedule=[],
            history=JobHistory(since=0.0, step_s=300.0, intervals=[]),
        )
        return NextState(name="1", state=nothing)

    board = Dashboard(
        settings,
        OpenAccounts(hotswapping=True),
        installed,
        state,
        host="127.0.0.1",
        many_users=True,
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
    with chromium(need("chromium", "chromium")) as started:
        yield started


@contextlib.contextmanager
def showing(browser: Browser, url: str, name: str, **options: Any) -> Iterator[Page]:
    """Open the page of a model; the browser must log no problem."""
    granted = ["clipboard-read", "clipboard-write"]
    with visiting(browser, f"{url}/#/model/{name}", permissions=granted, **options) as page:
        expect(page.get_by_role("tree")).to_be_visible()
        yield page


def labels(page: Page) -> list[str]:
    """Return the paths and classes of the modules that are shown."""
    items = page.get_by_role("treeitem").all()
    return [item.get_attribute("aria-label") or "" for item in items]


def test_model_page_shows_tree_facts_and_trace(browser: Browser, url: str) -> None:
    with showing(browser, url, GPT2) as page:
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


def test_figures_fill_width_of_phone(browser: Browser, url: str) -> None:
    with showing(browser, url, GPT2, viewport=PHONE) as page:
        tiles = page.get_by_label("Figures").locator(".tile").all()
        boxes = [box for tile in tiles if (box := tile.bounding_box())]
        assert len(boxes) == 6
        rows = {box["y"] for box in boxes}
        widths = [sum(box["width"] for box in boxes if box["y"] == row) for row in rows]
        assert max(widths) - min(widths) <= 2


def test_module_path_is_copied_and_follows_block_number(browser: Browser, url: str) -> None:
    with showing(browser, url, GPT2) as page:
        page.get_by_role("button", name="Expand all").click()
        row = page.get_by_role("treeitem", name="model.transformer.h[0].mlp, GPT2MLP")
        row.locator("> .module").hover()
        row.get_by_role(
            "button", name="Copy the path model.transformer.h[0].mlp", exact=True
        ).click()
        assert page.evaluate("navigator.clipboard.readText()") == "model.transformer.h[0].mlp"
        row.locator("> .module .module-name").click()
        page.get_by_role("spinbutton").fill("3")
        chosen = page.locator(".chosen-module")
        assert "saved = model.transformer.h[3].mlp.output.save()" in chosen.inner_text()
        assert "model.transformer.h[3].mlp.c_fc, Conv1D" in labels(page)
        page.get_by_role("spinbutton").fill("99")
        assert "model.transformer.h[3].mlp.output" in chosen.inner_text()


def test_search_filters_modules(browser: Browser, url: str) -> None:
    with showing(browser, url, GPT2) as page:
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


def test_keyboard_navigates_module_tree(browser: Browser, url: str) -> None:
    with showing(browser, url, GPT2) as page:
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


def test_renamed_module_is_shown_with_its_nnsight_name(browser: Browser, url: str) -> None:
    with showing(browser, url, BERT) as page:
        page.get_by_role("searchbox").fill("BertOutput")
        moved = page.get_by_role(
            "treeitem", name="model.bert.encoder.layer[0].E_output, BertOutput"
        )
        moved.locator("> .module").click()
        assert "model.bert.encoder.layer[0].E_output.output.save()" in (
            page.locator(".chosen-module").inner_text()
        )
        assert page.locator("#trace").get_by_text("nnsight 0.7").count() == 0


def test_repository_names_are_rendered_as_text(browser: Browser, url: str) -> None:
    with showing(browser, url, EVIL) as page:
        page.get_by_role("button", name="Expand all").click()
        shown = page.get_by_role("tree").inner_text()
        assert f'.get("{HOSTILE}")' in shown
        assert shown.count(HOSTILE) >= 3  # a module name of the config, and a class name
        page.get_by_role("treeitem", name=f'model.get("{HOSTILE}"), {HOSTILE}').locator(
            "> .module"
        ).click()
        assert HOSTILE in page.locator(".chosen-module h3").inner_text()
        assert page.locator("img").count() == 0


def test_page_reports_unmeasured_and_unknown_models(browser: Browser, url: str) -> None:
    with visiting(browser, f"{url}/#/model/tests/new") as page:
        expect(
            page.get_by_text("The modules are known once the model was measured")
        ).to_be_visible()
    for name in ("no/model", quote(HOSTILE), HOSTILE, "%E0%A4%A"):
        # The browser logs the 404.
        with visiting(browser, f"{url}/#/model/{name}", clean=False) as page:
            expect(page.get_by_text("This server does not know")).to_be_visible()
            assert page.locator("img").count() == 0


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_model_page_is_accessible_and_fits_viewport(
    browser: Browser, url: str, colours: str
) -> None:
    for viewport in (DESKTOP, PHONE):
        options = {"viewport": viewport, "color_scheme": colours}
        with showing(browser, url, GPT2, **options) as page:
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= viewport["width"]
            check_access(page)
