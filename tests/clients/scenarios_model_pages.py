"""Paths and traces of `GET /models`, run by a client of any generation."""

from __future__ import annotations

import json
import os
import runpy
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnsight
import torch
from nnsight import CONFIG


class Context:
    """The models: their names on the server, separated by commas, and a folder of their folders."""

    def __init__(self, names: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        if CONFIG.API.APIKEY is None:  # 0.7 cannot poll without a key
            CONFIG.API.APIKEY = ""
        major, minor = nnsight.__version__.split(".")[:2]
        self.generation = f"{major}.{minor}"
        self.pages = [
            Page(name, Path(folder) / name.partition("/")[2], self.generation)
            for name in names.split(",")
        ]


class Page:
    """One model's page of the server."""

    def __init__(self, name: str, folder: Path, generation: str) -> None:
        address = f"{os.environ['NDIF_HOST']}/models/{name}?generation={generation}"
        with urllib.request.urlopen(address) as answer:
            self.facts = json.load(answer)
        self.folder = folder

    @property
    def local(self) -> Any:
        """The same model in this process."""
        if hasattr(nnsight, "TransformersModel"):
            return nnsight.TransformersModel(
                str(self.folder), task=self.facts["task"], dispatch=True
            )
        return nnsight.LanguageModel(str(self.folder), dispatch=True)


def modules(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree["children"]:
        yield from modules(child)


def scenario_every_path_leads_to_its_module(context: Context) -> None:
    for page in context.pages:
        follow_every_path(page, context.generation)


def follow_every_path(page: Page, generation: str) -> None:
    model = page.local
    ids = set()
    for node in modules(page.facts["tree"]):
        path = node["paths"][generation]
        places = [path]
        for start, end in node["indices"] or ():
            parent, _, _ = path.rpartition("[")
            places += [f"{parent}[{index}]" for index in range(start, end + 1)]
        for place in places:
            module = eval(place, {"model": model})._module
            assert type(module).__name__ == node["class"], (place, type(module))
            assert sum(parameter.numel() for parameter in module.parameters()) == node["count"], (
                place
            )
            own = {
                name: (list(parameter.shape), f"{parameter.dtype}".removeprefix("torch."))
                for name, parameter in module.named_parameters(recurse=False)
            }
            described = {row["name"]: (row["shape"], row["dtype"]) for row in node["parameters"]}
            assert own == described, place
            ids |= {id(part) for part in module.modules()}
    assert ids == {id(part) for part in model._module.modules()}, "the tree leaves modules out"


def scenario_the_traces_run_as_they_are(context: Context) -> None:
    for page in context.pages:
        run_as_it_is(page, context.generation)


def run_as_it_is(page: Page, generation: str) -> None:
    text = page.facts["snippets"][generation]
    assert f'"{os.environ["NDIF_HOST"]}"' in text
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pasted.py"
        script.write_text(text)
        hidden = runpy.run_path(str(script), run_name="__main__")["hidden"]
    if isinstance(hidden, tuple):
        hidden = hidden[0]
    assert isinstance(hidden, torch.Tensor), page.facts["repo_id"]
    assert hidden.shape[-1] == page.facts["hidden_size"], page.facts["repo_id"]
    assert hidden.isfinite().all(), page.facts["repo_id"]
