"""The serialization of a block's values: results are kept in memory, streamed or refused."""

from __future__ import annotations

import io
import operator
import os
import resource
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import zstandard

from ndif.runtime.results import Result, ResultNotStoredError, ResultTooLargeError

MB = 1 << 20


def loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


def written(result: Result, path: Path, form: str) -> bytes:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        writers(result)[form](fd)
    finally:
        os.close(fd)
    return path.read_bytes()


def writers(result: Result) -> dict[str, Callable[[int], None]]:
    compressed = partial(result.write_compressed, threads=2)
    return {"plain": result.write, "frame": result.write_frame, "compressed": compressed}


def test_small_result_is_kept_in_memory() -> None:
    values = {"x": torch.arange(10), "text": "héllo", "nested": [{"a": torch.ones(2)}]}
    result = Result(values, max_bytes=MB, max_inline=MB)
    assert result.content is not None
    assert result.size == len(result.content)
    assert torch.equal(loaded(result.content)["x"], values["x"])
    unpacked = zstandard.ZstdDecompressor().decompress(result.compressed())
    assert unpacked == result.content


@pytest.mark.parametrize("form", ["plain", "frame", "compressed"])
def test_a_large_result_is_streamed(tmp_path: Path, form: str) -> None:
    values = {"x": torch.randn(3 * MB // 2), "y": torch.ones(5)}
    result = Result(values, max_bytes=100 * MB, max_inline=MB)
    assert result.content is None
    content = written(result, tmp_path / "result", form)
    if form != "plain":
        # nnsight 0.8 decompresses in one call, which needs the size in the frame.
        assert zstandard.get_frame_parameters(content).content_size == result.size
        content = zstandard.ZstdDecompressor().decompress(content)
    assert len(content) == result.size
    assert torch.equal(loaded(content)["x"], values["x"])


def test_saved_module_is_stripped_of_nnsight_hooks() -> None:
    """nnsight 0.7 replaces a module's forward with a function that refers to the module weakly."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    truth = model(torch.ones(2))
    for module in model.modules():
        reference = weakref.ref(module)

        def forward(value: Any, of: Any = reference) -> Any:
            return of().__nnsight_forward__(of(), value)

        def sentinel(_: Any, __: Any, output: Any) -> Any:
            return output

        forward.__module__ = sentinel.__module__ = "nnsight.intervention.interleaver"
        vars(module).update(
            __nnsight_forward__=type(module).forward, forward=forward, __path__="model"
        )
        module.register_forward_hook(sentinel)
    model.register_forward_hook(operator.methodcaller("__len__"))
    content = Result({"x": model}, max_bytes=MB, max_inline=MB).content
    assert content is not None
    value = loaded(content)["x"]
    assert "forward" not in {*vars(value), *vars(value[0])}
    assert len(value._forward_hooks) == 1
    assert torch.equal(value[0](torch.ones(2)).relu(), truth)


def test_only_compressible_results_are_compressed() -> None:
    noise = torch.randint(-(2**62), 2**62, (MB,))
    assert not Result({"x": noise}, 100 * MB, MB).compresses()
    activations = torch.randn(4 * MB).to(torch.bfloat16)
    assert Result({"x": activations}, 100 * MB, MB).compresses()


def test_too_large_result_raises_with_advice() -> None:
    with pytest.raises(ResultTooLargeError, match=r"more than 1MB.*Save fewer"):
        Result({"x": torch.zeros(MB)}, max_bytes=1_000_000, max_inline=100)


@pytest.mark.parametrize("numbers", [300, 3_000_000])
def test_full_disk_raises_result_not_stored(numbers: int) -> None:
    result = Result({"values": torch.randn(numbers)}, 1 << 30, 0)
    for write in writers(result).values():
        with (
            Path("/dev/full").open("wb") as full,
            pytest.raises(ResultNotStoredError, match="the server's disk is full"),
        ):
            write(full.fileno())


def test_partial_write_raises_result_not_stored(tmp_path: Path) -> None:
    """The system writes the first part, and refuses the rest."""
    result = Result({"values": torch.randn(3_000_000)}, 1 << 30, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MB, limits[1]))
    try:
        for form in writers(result):
            with pytest.raises(ResultNotStoredError, match=r"failed \(File too large\)"):
                written(result, tmp_path / form, form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "frame").stat().st_size == 5 * MB


def test_a_view_is_saved_without_its_storage() -> None:
    whole = torch.randn(100, 10_000)
    row = whole[7].requires_grad_(False)
    result = Result({"row": row, "again": row}, 100 * MB, 100 * MB)
    assert result.content is not None
    assert result.size < 2 * row.numel() * 4
    back = loaded(result.content)
    assert torch.equal(back["row"], row)
    assert back["row"] is back["again"]


def test_values_that_share_memory_still_share_it_after_loading() -> None:
    base = torch.zeros(100)
    result = Result({"base": base, "most": base[10:]}, MB, MB)
    assert result.content is not None
    back = loaded(result.content)
    back["base"][10] = 7
    assert back["most"][0] == 7


def test_class_sent_with_request_is_returned_as_clients_class() -> None:
    theirs = types.ModuleType("users_script")
    exec("class Probe:\n    pass", theirs.__dict__)
    # The server has the class by value only: its module is not importable.
    probe = cloudpickle.loads(cloudpickle.dumps(theirs.Probe()))
    probe.values = torch.ones(2)
    content = Result({"probe": probe}, MB, MB).content
    assert content is not None
    sys.modules["users_script"] = theirs
    try:
        assert type(loaded(content)["probe"]) is theirs.Probe
    finally:
        del sys.modules["users_script"]


def test_class_pickled_by_value_has_same_size_in_both_passes(tmp_path: Path) -> None:
    """A large result is serialized twice; its size comes from the first pass."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("class Made:\n    pass\nmade = Made()", scope)
    scope["made"].values = torch.randn(MB)
    result = Result({"made": scope["made"]}, 100 * MB, 0)
    content = written(result, tmp_path / "result", "plain")
    assert len(content) == result.size
    assert torch.equal(loaded(content)["made"].values, scope["made"].values)


def test_unpicklable_value_raises() -> None:
    with pytest.raises(TypeError, match="lock"):
        Result({"lock": __import__("threading").Lock()}, MB, MB)


def test_function_with_code_object_is_loadable() -> None:
    """cloudpickle refers to the class of code objects as a builtin, but `builtins` does not have it."""
    content = Result({"make": eval("lambda value: (lambda: value)")}, MB, MB).content
    assert content is not None
    assert loaded(content)["make"](3)() == 3


def test_code_and_cell_types_are_loadable() -> None:
    content = Result({"kinds": [types.CodeType, types.CellType]}, MB, MB).content
    assert content is not None
    assert loaded(content)["kinds"] == [types.CodeType, types.CellType]
