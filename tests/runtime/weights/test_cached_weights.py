"""A cache of weights that one process fills and another reads."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from ndif.runtime.weights.cached_weights import CachedWeights
from tests.runtime.process.pretend_driver import PretendDriver

pytestmark = pytest.mark.process

DRIVER = PretendDriver(Path(tempfile.mkdtemp()))

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
)

READER = """
import os, pickle, sys, torch
cached = pickle.loads(sys.stdin.buffer.read())
tensors = cached.tensors(int(sys.argv[1]))

def seen(tensor):
    values = tensor.detach().float().flatten().tolist()
    return values, str(tensor.dtype), type(tensor).__name__, tensor.requires_grad

sys.stdout.buffer.write(pickle.dumps({name: seen(tensor) for name, tensor in tensors.items()}))
"""


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tied = torch.nn.Parameter(torch.randn(4, 2))
    return {
        **tensors,
        "tied": tied,
        "tied too": tied,
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "strided": torch.randn(6, 4).t(),
        "number": torch.tensor(3.5),
        "nothing": torch.empty(0, 7),
    }


def test_cached_tensors_are_unchanged() -> None:
    before = some_tensors()
    cached = CachedWeights.of(before)
    fd = cached.fill(before, DRIVER)
    after = pickle.loads(pickle.dumps(cached)).tensors(fd)
    os.close(fd)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert type(after[name]) is type(tensor), name
        assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape), name
        assert after[name].requires_grad == tensor.requires_grad, name
    assert after["tied"] is after["tied too"]


def test_another_process_reads_same_tensors(tmp_path: Path) -> None:
    before = some_tensors()
    cached = CachedWeights.of(before)
    fd = cached.fill(before, DRIVER)
    process = subprocess.run(
        [sys.executable, "-c", READER, str(fd)],
        input=pickle.dumps(cached),
        stdout=subprocess.PIPE,
        pass_fds=[fd],
        check=True,
    )
    os.close(fd)
    after = pickle.loads(process.stdout)
    for name, tensor in before.items():
        values = tensor.detach().float().flatten().tolist()
        kind, grad = type(tensor).__name__, tensor.requires_grad
        assert after[name] == (values, str(tensor.dtype), kind, grad), name


def test_cache_memory_is_freed_with_its_last_user() -> None:
    tensors = {"large": torch.ones(1 << 20)}
    cached = CachedWeights.of(tensors)
    fd = cached.fill(tensors, DRIVER)
    taken = cached.tensors(fd)
    os.close(fd)
    assert mapped()
    assert bool(taken["large"].all())
    del taken
    assert not mapped()


def mapped() -> bool:
    return "/memfd:cached weights" in Path("/proc/self/maps").read_text()


def test_model_without_tensors_can_be_cached() -> None:
    cached = CachedWeights.of({})
    fd = cached.fill({}, DRIVER)
    assert cached.tensors(fd) == {}
    os.close(fd)
