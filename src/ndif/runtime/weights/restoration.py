"""Weights as they were loaded, for those that a request has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ndif.runtime.weights import WeightsError

Source = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""Finds weights by name; it may find fewer, and others than they were: a seal tells."""

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMED = 5


def restore(
    held: Mapping[str, torch.Tensor],
    changed: Sequence[str],
    sources: Sequence[Source],
    broken: Callable[[Mapping[str, torch.Tensor]], list[str]],
) -> None:
    """Write changed weights again where others have them mapped.

    Args:
        sources: Where unchanged ones are found; the next is asked for what the ones before it lacked.
        broken: Which of some weights are not as they were.

    Raises:
        WeightsError: if some could not be restored from any source.
    """
    left = list(changed)
    for source in sources:
        with torch.no_grad():
            for name, tensor in source(left).items():
                if tensor.shape == held[name].shape:
                    held[name].copy_(tensor)
        left = broken({name: held[name] for name in left})
        if not left:
            return
    raise WeightsError(
        f"weights that a request changed could not be restored: {', '.join(left[:_NAMED])}"
    )


def from_safetensors(folder: Path) -> Source:
    """Return a source that reads single tensors of a checkpoint's files.

    Not every model has its weights there under its own names, or unchanged: some are merged or converted
    when they are loaded.
    """

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        files = dict(_files(folder))
        found = {}
        for name in names:
            stored = next((other for other in _spellings(name, files) if other in files), None)
            if stored is not None:
                with safe_open(files[stored], framework="pt") as file:
                    found[name] = file.get_tensor(stored)
        return found

    return read


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of each stored tensor and the file that it is in."""
    index = folder / _INDEX
    if index.is_file():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            yield name, folder / file
    elif (folder / _ONE_FILE).is_file():
        with safe_open(folder / _ONE_FILE, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                yield name, folder / _ONE_FILE


def _spellings(name: str, stored: Mapping[str, Path]) -> Iterator[str]:
    """Yield the names that a tensor may be stored by: a model's prefix is there, or is not."""
    yield name
    yield name.partition(".")[2]
    prefixes = {other.partition(".")[0] for other in stored}
    yield from (f"{prefix}.{name}" for prefix in sorted(prefixes))
