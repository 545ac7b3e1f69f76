"""Module paths by the rules of each generation; tests/clients resolves real paths."""

from __future__ import annotations

import ast
import inspect

import pytest
from nnsight.intervention.envoy import Envoy

from ndif.gateway.module_paths import MOVED_MODULES, VALUES, Place, literal
from ndif.schema.structure import ModuleNode


def node(name: str, *children: ModuleNode, index: tuple[int, int] | None = None) -> ModuleNode:
    indices = None if index is None else [index]
    return ModuleNode(
        name=name,
        class_name="Module",
        parameters=[],
        count=0,
        indices=indices,
        children=list(children),
    )


def paths(generation: str, *children: ModuleNode) -> list[str]:
    root = Place("model", node("", *children), generation)
    return [child.path for child in root.children()]


def test_moved_module_names_match_envoy_properties() -> None:
    served = {
        name
        for name in dir(Envoy)
        if not name.startswith("_") and inspect.isdatadescriptor(getattr(Envoy, name))
    }
    assert served == MOVED_MODULES
    assert set(VALUES) < MOVED_MODULES


def test_module_named_like_value_is_renamed() -> None:
    layer = node("layer", node("output"), node("dense"))
    assert paths("0.8", *layer.children) == ["model.E_output", "model.dense"]
    assert paths("0.7", *layer.children) == ["model.output", "model.dense"]
    assert Place("model", layer, "0.8").value("output") == "output"
    assert Place("model", layer, "0.7").value("output") == "nns_output"
    assert Place("model", layer, "0.7").renamed == {"output": "nns_output"}
    assert Place("model", layer, "0.7").value("input") == "input"


@pytest.mark.parametrize("generation", ["0.8", "0.7", "0.6"])
def test_numbered_modules_are_indexed(generation: str) -> None:
    first, others = node("0", index=(0, 0)), node("1", index=(1, 7))
    assert paths(generation, first, others) == ["model[0]", "model[1]"]
    # Older clients count children, whatever their names are.
    assert paths(generation, node("1", index=(1, 7))) == ['model.get("1")']
    assert paths(generation, first, node("last")) == ['model.get("0")', "model.last"]


@pytest.mark.parametrize(
    "name",
    ["lambda", "a b", 'quo"te', "it's", "\u202egnirts", "\n", "<img src=x onerror=alert(1)>"],
)
def test_name_that_is_not_an_identifier_becomes_literal(name: str) -> None:
    (path,) = paths("0.8", node(name))
    call = ast.parse(path, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.literal_eval(call.args[0]) == name
    assert literal(name).isprintable()


def test_module_path_follows_index_within_node() -> None:
    (place,) = Place("model.a[3]", node("", node("0", index=(0, 7))), "0.8").children()
    assert place.at(5).path == "model.a[3][5]"
