"""Traces of one model, ready to be pasted, for each nnsight generation."""

from __future__ import annotations

from collections import deque

from ndif.gateway.module_paths import ROOT, Place, literal
from ndif.schema.deployment import task_of
from ndif.schema.structure import ModelStructure

_PROMPT = "The Eiffel Tower is in the city of"
_MASKS = "fill-mask"
_TAKE_TEXT = frozenset(
    (
        None,
        _MASKS,
        *("text-generation", "feature-extraction", "text-classification", "token-classification"),
        *("text2text-generation", "summarization", "translation"),
    )
)
"""Tasks whose models take a text alone."""
_GENERATES = "text-generation"
_OLDER = ("0.7", "0.6")


def suits(generation: str, structure: ModelStructure) -> bool:
    """Return True if a model of that structure can be the one that a generation loads."""
    return generation not in _OLDER or task_of([structure.tree.class_name]) == _GENERATES


def snippet(
    generation: str,
    url: str,
    repo_id: str,
    revision: str | None,
    task: str | None,
    structure: ModelStructure,
) -> str | None:
    """Return a trace that saves the output of one module; None for a model that takes no text."""
    if not structure.tokenizer or task not in _TAKE_TEXT:
        return None
    is_older = generation in _OLDER
    if is_older and task not in (None, _GENERATES):
        return None
    kind = "LanguageModel" if is_older else "TransformersModel"
    arguments = [literal(repo_id)]
    if revision is not None:
        arguments.append(f"revision={literal(revision)}")
    if task is not None and not is_older:
        arguments.append(f"task={literal(task)}")
    place = telling(Place(ROOT, structure.tree, generation))
    lines = [
        "import os",
        "",
        f'os.environ["NDIF_HOST"] = {literal(url)}  # before nnsight is imported',
        '# os.environ["NDIF_API_KEY"] = "…"  # your key, where the server asks for one',
        "",
        f"from nnsight import {kind}",
        "",
        f"model = {kind}({', '.join(arguments)})",
        "",
        *_prepared(task, structure),
        f"with model.trace({_given(task, structure)}, remote=True):",
        f"    hidden = {place.path}.{place.value('output')}.save()",
        "",
        "print(hidden)",
    ]
    return "\n".join(lines) + "\n"


def _prepared(task: str | None, structure: ModelStructure) -> list[str]:
    if not structure.encoder_decoder:
        return []
    return [f'tokens = model.tokenizer({literal(_PROMPT)}, return_tensors="pt")["input_ids"]', ""]


def _given(task: str | None, structure: ModelStructure) -> str:
    if structure.encoder_decoder:  # a text says nothing of how the decoder begins
        return '{"input_ids": tokens, "decoder_input_ids": tokens[:, :1]}'
    if task == _MASKS:
        return f'f"{_PROMPT} {{model.tokenizer.mask_token}}"'
    return literal(_PROMPT)


def telling(root: Place) -> Place:
    """Return the module that a first trace is about: in the middle of the blocks that make up the model.

    These are the modules of one container that have the most parameters together. A model without such
    blocks has its largest module told of.
    """
    best, most = root, 0
    waiting = deque([root])
    while waiting:
        place = waiting.popleft()
        for child in place.children():
            waiting.append(child)
            size = child.node.count * child.node.number
            if child.node.indices is not None and child.path.endswith("]") and size > most:
                best, most = child, size
    if best is root:
        children = list(root.children())
        return max(children, key=lambda child: child.node.count, default=root)
    first, last = (best.node.indices or [(0, 0)])[0]
    return best.at((first + last) // 2)
