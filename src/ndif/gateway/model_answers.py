"""The answer of `GET /models/{repo_id}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from ndif.schema.answer import JsonObject, answer
from ndif.schema.states import DeploymentLevel, ReplicaState
from ndif.schema.structure import TensorShape

_NORM = {
    "name": "ln_1",
    "class": "LayerNorm",
    "paths": {
        "0.8": "model.transformer.h[0].ln_1",
        "0.7": "model.transformer.h[0].ln_1",
    },
    "renamed": {},
    "parameters": [
        {"name": "weight", "shape": [768], "dtype": "float32"},
        {"name": "bias", "shape": [768], "dtype": "float32"},
    ],
    "count": 1536,
    "number": 1,
    "indices": None,
    "omitted": 0,
    "children": [],
}


def _around(name: str, kind: str, count: int, child: JsonObject, **more: Any) -> JsonObject:
    """Return the parent module of `child`, whose paths are those of the child without the last step."""
    last = f"[{child['name']}]" if child["indices"] else f".{child['name']}"
    paths = {each: path.removesuffix(last) for each, path in child["paths"].items()}
    return {
        **child,
        "name": name,
        "class": kind,
        "paths": paths,
        "parameters": [],
        "count": count,
        "number": 1,
        "indices": None,
        "omitted": 0,
        "children": [child],
        **more,
    }


_BLOCK = _around("0", "GPT2Block", 7087872, _NORM, number=12, indices=[[0, 11]], omitted=3)
_BODY = _around(
    "transformer", "GPT2Model", 124439808, _around("h", "ModuleList", 85054464, _BLOCK), omitted=4
)
_TREE = _around("", "GPT2LMHeadModel", 124439808, _BODY, omitted=1)
_TRACE = """\
import os

os.environ["NDIF_HOST"] = "https://ndif.example.org"  # before nnsight is imported
# os.environ["NDIF_API_KEY"] = "…"  # your key, where the server asks for one

from nnsight import LanguageModel

model = LanguageModel("openai-community/gpt2")

with model.trace("The Eiffel Tower is in the city of", remote=True):
    hidden = model.transformer.h[5].output.save()

print(hidden)
"""


@answer()
class DescribedModule:
    """A module, or several of one container that have the same structure."""

    name: str
    class_name: Annotated[str, Field(alias="class")]
    paths: Mapping[str, str]
    """Path as one writes it in a trace, by nnsight generation; of the first of several modules."""
    renamed: Mapping[str, Mapping[str, str]]
    """By generation, values that are read by another name: `nns_output` for `output`."""
    parameters: Sequence[TensorShape]
    """Parameters of its own."""
    count: int
    """Number of parameters, with those of modules below it; of one module, if there are several."""
    number: int
    """Modules that have this structure."""
    indices: list[tuple[int, int]] | None
    """First and last index of each run of them."""
    omitted: int
    """Children that are not described."""
    children: list[DescribedModule]


@answer(
    example={
        "repo_id": "openai-community/gpt2",
        "revision": None,
        "task": "text-generation",
        "dedicated": True,
        "gated": False,
        "card": "https://huggingface.co/openai-community/gpt2",
        "license": "mit",
        "deployment_level": "HOT",
        "state": "RUNNING",
        "runtimes": {"0.8": "RUNNING"},
        "replicas": {"0.8": 1},
        "generations": ["0.8", "0.7"],
        "adapters": ["0.8"],
        "load_s": {"0.8": 3.2},
        "generation": "0.8",
        "parameters": 124439808,
        "dtype": "float32",
        "bytes": 497759232,
        "hidden_size": 768,
        "layers": 12,
        "heads": 12,
        "vocabulary": 50257,
        "context_length": 1024,
        "tokenizer": True,
        "snippets": {"0.7": _TRACE},
        "tree": _TREE,
    }
)
class DescribedModel:
    """A model that the server knows: its tree of modules, and facts about it."""

    repo_id: str
    revision: str | None
    task: str | None
    dedicated: bool
    """True if it is not evicted for others."""
    gated: bool
    """True if the hub gives it only to those whom its authors permitted."""
    card: str | None
    """Address of its card at the hub; null for a folder of the server's."""
    license: str | None
    """Licence by its card; null while unknown."""
    deployment_level: DeploymentLevel
    state: ReplicaState
    runtimes: Mapping[str, ReplicaState]
    """State by nnsight generation, of those that have one."""
    replicas: Mapping[str, int]
    """Replicas that serve, by nnsight generation."""
    generations: Sequence[str]
    """nnsight generations whose clients may use it, the newest first."""
    adapters: Sequence[str]
    """Generations whose requests may name an adapter (PEFT) for it."""
    load_s: Mapping[str, float]
    """Seconds that its last load took, by generation; without those not loaded since this server leads."""
    generation: str | None
    """The generation that the tree and what follows were told by; null while there is no tree."""
    parameters: int | None
    dtype: str | None
    bytes: int | None
    """Bytes of its parameters and buffers, which are loaded."""
    hidden_size: int | None
    layers: int | None
    heads: int | None
    vocabulary: int | None
    context_length: int | None
    """Most tokens of one input, by its config."""
    tokenizer: bool | None
    snippets: Mapping[str, str]
    """A trace to paste, by generation; none for a model that takes no text."""
    tree: DescribedModule | None
    """Tree of modules; null until the model was measured or loaded."""
