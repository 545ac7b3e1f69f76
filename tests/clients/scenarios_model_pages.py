"""What `GET /models` says of a model, put to the test by a client of any generation."""

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
    """Where the model is: a name for a server, a folder here."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        if CONFIG.API.APIKEY is None:  # which 0.7 cannot poll with
            CONFIG.API.APIKEY = ""
        major, minor = nnsight.__version__.split(".")[:2]
        self.generation = f"{major}.{minor}"
        address = f"{os.environ['NDIF_HOST']}/models/{name}?generation={self.generation}"
        with urllib.request.urlopen(address) as answer:
            self.told = json.load(answer)
        self.folder = folder

    @property
    def local(self) -> Any:
        """The same model in this process."""
        if hasattr(nnsight, "TransformersModel"):
            return nnsight.TransformersModel(self.folder, task=self.told["task"], dispatch=True)
        return nnsight.LanguageModel(self.folder, dispatch=True)


def modules(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree["children"]:
        yield from modules(child)


def scenario_every_path_leads_to_its_module(context: Context) -> None:
    model = context.local
    named = {id(module) for module in model._module.modules()}
    found, folded = set(), 0
    for node in modules(context.told["tree"]):
        path = node["paths"][context.generation]
        first = eval(path, {"model": model})
        places = [first]
        for start, end in node["indices"] or ():
            parent, _, _ = path.rpartition("[")
            places += [
                eval(f"{parent}[{index}]", {"model": model}) for index in range(start, end + 1)
            ]
        for place in places:
            module = place._module
            assert type(module).__name__ == node["class"], (path, type(module))
            assert sum(each.numel() for each in module.parameters()) == node["count"], path
            own = {
                name: (list(each.shape), f"{each.dtype}".removeprefix("torch."))
                for name, each in module.named_parameters(recurse=False)
            }
            told = {each["name"]: (each["shape"], each["dtype"]) for each in node["parameters"]}
            assert own == told, path
            found |= {id(each) for each in module.modules()}
        folded += node["number"] > 1
    assert found == named, "the tree leaves modules out"
    assert folded >= 1


def scenario_the_trace_runs_as_it_is(context: Context) -> None:
    text = context.told["snippets"][context.generation]
    assert f'"{os.environ["NDIF_HOST"]}"' in text
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pasted.py"
        script.write_text(text)
        ran = runpy.run_path(str(script), run_name="__main__")
    hidden = ran["hidden"]
    if isinstance(hidden, tuple):
        hidden = hidden[0]
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape[-1] == context.told["hidden_size"]
    assert hidden.isfinite().all()
