"""Example traces of one model, ready to paste, for each nnsight generation."""

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
"""Tasks whose models take text and nothing else; None for a model without a task."""
_GENERATES = "text-generation"
_OLDER = ("0.7", "0.6")


def can_load(generation: str, structure: ModelStructure) -> bool:
    """Return True if a generation can load a model of that structure."""
    return generation not in _OLDER or task_of([structure.tree.class_name]) == _GENERATES


def snippet(
    generation: str,
    url: str,
    repo_id: str,
    revision: str | None,
    task: str | None,
    structure: ModelStructure,
) -> str | None:
    """Return a trace that saves one module's output; None if the model takes no text or does not load."""
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
    place = example_module(Place(ROOT, structure.tree, generation))
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
        *_preparation(task, structure),
        f"with model.trace({_input(task, structure)}, remote=True):",
        f"    hidden = {place.path}.{place.value('output')}.save()",
        "",
        "print(hidden)",
    ]
    return "\n".join(lines) + "\n"


def _preparation(task: str | None, structure: ModelStructure) -> list[str]:
    if not structure.encoder_decoder:
        return []
    return [f'tokens = model.tokenizer({literal(_PROMPT)}, return_tensors="pt")["input_ids"]', ""]


def _input(task: str | None, structure: ModelStructure) -> str:
    if structure.encoder_decoder:  # text alone leaves the decoder without input ids
        return '{"input_ids": tokens, "decoder_input_ids": tokens[:, :1]}'
    if task == _MASKS:
        return f'f"{_PROMPT} {{model.tokenizer.mask_token}}"'
    return literal(_PROMPT)


def example_module(root: Place) -> Place:
    """Return the module for an example trace: the middle one of the model's main blocks.

    The main blocks are the equal modules of one container with the most parameters in total. Without such
    blocks, return the root's largest child.
    """
    largest, largest_size = root, 0
    waiting = deque([root])
    while waiting:
        place = waiting.popleft()
        for child in place.children():
            waiting.append(child)
            size = child.node.count * child.node.number
            if child.node.indices is not None and child.path.endswith("]") and size > largest_size:
                largest, largest_size = child, size
    if largest is root:
        children = list(root.children())
        return max(children, key=lambda child: child.node.count, default=root)
    first, last = (largest.node.indices or [(0, 0)])[0]
    return largest.at((first + last) // 2)
