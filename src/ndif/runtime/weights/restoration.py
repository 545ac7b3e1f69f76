"""The restoration of weights that a request has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from ndif.runtime.weights.weights import WeightsError

Source = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""A function that returns weights by name. Some may be missing or wrong: the checksum decides."""

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_NAMED = 5


def restore(
    weights: Mapping[str, torch.Tensor],
    changed: Sequence[str],
    sources: Sequence[Source],
    find_changed: Callable[[Mapping[str, torch.Tensor]], list[str]],
) -> None:
    """Restore changed weights in place, in the memory that other processes have mapped.

    Sources are tried in order until `find_changed` finds no changed weight, else WeightsError is raised.
    """
    left = list(changed)
    for source in sources:
        with torch.no_grad():
            for name, tensor in source(left).items():
                if tensor.shape == weights[name].shape:
                    weights[name].copy_(tensor)
        left = find_changed({name: weights[name] for name in left})
        if not left:
            return
    raise WeightsError(
        f"weights that a request changed could not be restored: {', '.join(left[:_MAX_NAMED])}"
    )


def from_safetensors(folder: Path) -> Source:
    """Return a source that reads a checkpoint's files; it lacks weights that loading merges or converts."""

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        files = dict(_files(folder))
        tensors = {}
        for name in names:
            stored = next((other for other in _spellings(name, files) if other in files), None)
            if stored is not None:
                with safe_open(files[stored], framework="pt") as file:
                    tensors[name] = file.get_tensor(stored)
        return tensors

    return read


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of each stored tensor and its file."""
    index = folder / _INDEX
    if index.is_file():
        for name, file in json.loads(index.read_text())["weight_map"].items():
            yield name, folder / file
    elif (folder / _ONE_FILE).is_file():
        with safe_open(folder / _ONE_FILE, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, folder / _ONE_FILE


def _spellings(name: str, stored: Mapping[str, Path]) -> Iterator[str]:
    """Yield the names under which a tensor may be stored, with and without a model's prefix."""
    yield name
    yield name.partition(".")[2]
    prefixes = {other.partition(".")[0] for other in stored}
    yield from (f"{prefix}.{name}" for prefix in sorted(prefixes))
