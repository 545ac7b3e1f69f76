"""The structure of a model: its tree of modules, and facts that researchers look for first.

Nothing here reads a weight, so the model may be on the meta device. The author of the repository chooses
names and numbers, so all output is bounded text and integers. `ndif.schema.structure` validates it.
"""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections import deque
from pathlib import Path
from typing import Any

import torch

from ndif.runtime.weights.card import has_tokenizer, read_license

MAX_BYTES = 1 << 17
"""Largest structure, in bytes of JSON; the structure of a 70B model has about four thousand."""
_MAX_NODES, _MAX_DEPTH, _MAX_MODULES = 1024, 24, 200_000
_MAX_CHILDREN, _MAX_PARAMETERS, _MAX_DIMENSIONS, _MAX_RUNS = 256, 32, 8, 256
_MAX_NAME = 128
"""Largest length of a module's name. A longer name is omitted: a truncated path would be wrong."""
_LARGEST = 1 << 62
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_NUMBERS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "context_length": "max_position_embeddings",
}
"""Config attributes; transformers maps them to the names that each architecture uses."""

Node = dict[str, Any]


def describe_structure(module: Any, folder: Path) -> dict[str, Any]:
    """Return the structure of a model as JSON values; `folder` holds its repository's files."""
    config = getattr(module, "config", None)
    return {
        "tree": _shrink_to_limit(_Tree().node(module, "", 0)),
        "dtype": _name_of(getattr(module, "dtype", None)),
        "bytes": _bytes(module),
        **_numbers(config),
        "encoder_decoder": getattr(config, "is_encoder_decoder", None) is True,
        "tokenizer": has_tokenizer(file.name for file in folder.iterdir()),
        "license": read_license(folder),
    }


def structure_or_none(module: Any, folder: Path) -> dict[str, Any] | None:
    """Return the structure of a model, or log the error and return None: the model is served without it."""
    try:
        return describe_structure(module, folder)
    except Exception:
        traceback.print_exc()
        return None


def _numbers(config: Any) -> dict[str, int | None]:
    text = config
    if hasattr(config, "get_text_config"):
        text = config.get_text_config()
    numbers = {name: getattr(text, attribute, None) for name, attribute in _NUMBERS.items()}
    return {
        name: value if type(value) is int and 0 <= value < _LARGEST else None
        for name, value in numbers.items()
    }


def _bytes(module: Any) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Tree:
    """Describes modules, and folds indexed siblings of the same structure into one node."""

    def __init__(self) -> None:
        self._left = _MAX_MODULES
        self._signatures: dict[int, bytes] = {}
        """Digest of each node's structure, by the id of the node."""

    def node(self, module: Any, name: str, depth: int) -> Node:
        self._left -= 1
        own = list(module.named_parameters(recurse=False))
        children, omitted = self._children(module, depth)
        node: Node = {
            "name": name,
            "class": type(module).__name__[:_MAX_NAME],
            "parameters": [
                {"name": key, "shape": list(tensor.shape), "dtype": _name_of(tensor.dtype)}
                for key, tensor in own[:_MAX_PARAMETERS]
                if len(key) <= _MAX_NAME and tensor.dim() <= _MAX_DIMENSIONS
            ],
            "count": sum(parameter.numel() for parameter in module.parameters()),
            "children": children,
        }
        if omitted:
            node["omitted"] = omitted
        self._signatures[id(node)] = self._signature(node)
        return node

    def _children(self, module: Any, depth: int) -> tuple[list[Node], int]:
        """Return the nodes of a module's children, and the number of children without a node."""
        children: list[Node] = []
        folded: dict[bytes, Node] = {}
        omitted = 0
        for name, child in module.named_children():
            if depth >= _MAX_DEPTH or self._left <= 0 or len(name) > _MAX_NAME:
                omitted += 1
                continue
            node = self.node(child, name, depth + 1)
            if not _INDEX.fullmatch(name):
                children.append(node)
                continue
            index, first = int(name), folded.get(self._signatures[id(node)])
            if first is None:
                node["indices"] = [[index, index]]
                folded[self._signatures[id(node)]] = node
                children.append(node)
            elif first["indices"][-1][1] == index - 1:
                first["indices"][-1][1] = index
            elif len(first["indices"]) >= _MAX_RUNS:
                omitted += 1
            else:
                first["indices"].append([index, index])
        return children[:_MAX_CHILDREN], omitted + len(children[_MAX_CHILDREN:])

    def _signature(self, node: Node) -> bytes:
        own = {key: value for key, value in node.items() if key not in ("name", "children")}
        digest = hashlib.sha256(json.dumps(own).encode())
        for child in node["children"]:
            place = child.get("indices") or child["name"]
            digest.update(json.dumps(place).encode() + self._signatures[id(child)])
        return digest.digest()


def _shrink_to_limit(tree: Node) -> Node:
    """Cut a tree to the size limit, deepest nodes first, and return it."""
    limit = _MAX_NODES
    _cut(tree, limit)
    # A quarter of the limit is left for the other facts.
    while len(json.dumps(tree)) > MAX_BYTES * 3 // 4 and limit > 1:
        limit //= 2
        _cut(tree, limit)
    return tree


def _cut(tree: Node, limit: int) -> None:
    """Keep the first `limit` nodes of a tree in breadth-first order."""
    queue = deque([tree])
    left = limit - 1
    while queue:
        node = queue.popleft()
        kept = node["children"][: max(0, left)]
        left -= len(kept)
        if omitted := len(node["children"]) - len(kept):
            node["omitted"] = node.get("omitted", 0) + omitted
        node["children"] = kept
        queue += kept


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
