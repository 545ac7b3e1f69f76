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


def _parent(name: str, kind: str, count: int, child: JsonObject, **more: Any) -> JsonObject:
    """Return an example parent of `child`; its paths are the paths of `child` without the last step."""
    last = f"[{child['name']}]" if child["indices"] else f".{child['name']}"
    paths = {generation: path.removesuffix(last) for generation, path in child["paths"].items()}
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


_BLOCK = _parent("0", "GPT2Block", 7087872, _NORM, number=12, indices=[[0, 11]], omitted=3)
_BODY = _parent(
    "transformer", "GPT2Model", 124439808, _parent("h", "ModuleList", 85054464, _BLOCK), omitted=4
)
_TREE = _parent("", "GPT2LMHeadModel", 124439808, _BODY, omitted=1)
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
    """A module, or several modules of one container that have the same structure."""

    name: str
    class_name: Annotated[str, Field(alias="class")]
    paths: Mapping[str, str]
    """Path in a trace, by nnsight generation; for several modules, the path of the first."""
    renamed: Mapping[str, Mapping[str, str]]
    """Values that have another name in a trace, by generation: `nns_output` for `output`."""
    parameters: Sequence[TensorShape]
    """Parameters of the module itself."""
    count: int
    """Number of parameters of one module, including the modules below it."""
    number: int
    """Modules that have this structure."""
    indices: list[tuple[int, int]] | None
    """First and last index of each run of these modules."""
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
    """True if the model is not evicted for other models."""
    gated: bool
    """True if the hub restricts the model to users that its authors permitted."""
    card: str | None
    """URL of the model's card at the hub; null for a model from a folder of the server."""
    license: str | None
    """Licence named by the card; null while unknown."""
    deployment_level: DeploymentLevel
    state: ReplicaState
    runtimes: Mapping[str, ReplicaState]
    """State by nnsight generation; generations without a state are omitted."""
    replicas: Mapping[str, int]
    """Number of serving replicas, by nnsight generation."""
    generations: Sequence[str]
    """nnsight generations whose clients may use the model, the newest first."""
    adapters: Sequence[str]
    """Generations whose requests may name an adapter (PEFT) for the model."""
    load_s: Mapping[str, float]
    """Seconds of the last load, by generation; only loads by the current leader."""
    generation: str | None
    """Generation whose structure gives the tree and the facts below; null while there is no tree."""
    parameters: int | None
    dtype: str | None
    bytes: int | None
    """Bytes of the loaded parameters and buffers."""
    hidden_size: int | None
    layers: int | None
    heads: int | None
    vocabulary: int | None
    context_length: int | None
    """Maximum tokens of one input, from the model's config."""
    tokenizer: bool | None
    snippets: Mapping[str, str]
    """Trace to paste, by generation; empty for a model that takes no text."""
    tree: DescribedModule | None
    """Tree of modules; null until the model was measured or loaded."""
