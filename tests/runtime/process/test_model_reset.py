"""Trusted requests on one runner: each finds the model as loaded, whatever earlier requests did."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import nnsight
import pytest
import torch
from nnsight import TransformersModel

from ndif.runtime.process.model_reset import ModelReset
from ndif.runtime.process.model_state import ResetError
from ndif.schema.response import InlineResult, Response
from ndif.schema.status import Status
from tests.runtime.process.settings_left import SETTINGS
from tests.runtime.replica import PROMPT, Sent, Served, expected, reading, serve
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

T = TypeVar("T")
WEIGHT = "weight = model._module.transformer.h[0].mlp.c_fc.weight\n"


def executing(client: TransformersModel, code: str) -> bytes:
    """Return a session that runs `code`, then a trace. It returns the logits, its process and `said`."""
    sent = Sent()
    with client.session(backend=sent):
        import os

        space = {"model": client, "__name__": "users"}
        exec("import torch\n" + code, space)
        with client.trace(PROMPT):
            logits = client.lm_head.output.save()
        nnsight.save(logits)
        told = nnsight.save([os.getpid(), space.get("said")])  # noqa: F841 - the result
    return sent.payload


class Site:
    """A replica with trusted requests, on a separate event loop."""

    def __init__(self, folder: Path, client: TransformersModel) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._context = serve(folder)
        self.served: Served = self.wait(self._context.__aenter__())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def run(self, code: str, **env: str) -> tuple[torch.Tensor, int]:
        """Return the logits of a request that runs `code` first, and its process."""
        saves = self.saves(code, **env)
        return saves["logits"], saves["told"][0]

    def says(self, code: str) -> tuple[int, Any]:
        """Return the process of a request, and the value that its `code` assigned to `said`."""
        process, text = self.saves(code)["told"]
        return process, text

    def saves(self, code: str, **env: str) -> dict[str, Any]:
        payload = executing(self.client, code)
        response: Response = self.wait(self.served.run(payload, env=env))
        assert response.status is Status.COMPLETED, response.description
        assert isinstance(response.data, InlineResult)
        saves: dict[str, Any] = torch.load(io.BytesIO(response.data.content), weights_only=False)
        return saves

    def close(self) -> None:
        self.wait(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def site(tiny_gpt2: Path) -> Iterator[Site]:
    started = Site(tiny_gpt2, TransformersModel(str(tiny_gpt2), task="text-generation"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def truth(tiny_gpt2: Path) -> torch.Tensor:
    return expected(tiny_gpt2)


WRITES = {
    "data": WEIGHT + "weight.data[0, 0] += 1",
    "all of it": WEIGHT + "weight.data.mul_(2)",
    "no_grad": WEIGHT + "with torch.no_grad(): weight[3].zero_()",
    "a numpy view": WEIGHT + "weight.detach().numpy()[0, 0] = 7",
    "a small weight": "model._module.transformer.ln_f.bias.data[3] = 5",
    "other data": WEIGHT + "weight.data = weight.data * 2",
    "other data at the address of the first": (
        WEIGHT + "shape = weight.shape\n"
        "weight.data = torch.empty(0)\nweight.data = torch.zeros(shape)"
    ),
    "load_state_dict": (
        "state = {name: each * 2 for name, each in model._module.state_dict().items()}\n"
        "model._module.load_state_dict(state)"
    ),
    "a buffer's contents": (
        "for buffer in model._module.buffers(): buffer.zero_()\n"
        "model._module.transformer.ln_f.weight.data += 1"
    ),
    "an optimizer's step": (
        "optimizer = torch.optim.SGD(model._module.parameters(), lr=1)\n"
        "model._module(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()\n"
        "optimizer.step()"
    ),
    "a patched function": (
        "before = torch.nn.functional.layer_norm\n"
        "torch.nn.functional.layer_norm = lambda *given: before(*given) * 2"
    ),
}
"""Changes that end a runner."""

RESTORED = {
    "a replaced parameter": (
        "mlp = model._module.transformer.h[0].mlp.c_fc\n"
        "mlp.weight = torch.nn.Parameter(mlp.weight.detach() * 2)"
    ),
    "a replaced module": "model._module.transformer.h[1].mlp = torch.nn.Identity()",
    "a hook": (
        "model._module.transformer.h[1].mlp.register_forward_hook(lambda _, __, out: out * 2)"
    ),
    "a hook before": (
        "model._module.transformer.h[1].mlp.register_forward_pre_hook(lambda _, given: (given[0] * 2,))"
    ),
    "a patched forward": "model._module.transformer.h[1].mlp.forward = lambda hidden: hidden * 2",
    "a parametrization": (
        "import torch.nn.utils.parametrize as parametrize\n"
        "class Double(torch.nn.Module):\n"
        "    def forward(self, weight): return weight * 2\n"
        "part = model._module.transformer.ln_f\n"
        "parametrize.register_parametrization(part, 'weight', Double())"
    ),
    "training": "model._module.transformer.h[1].train(); model._module.config.resid_pdrop = 0.9",
    "a dropout": "model._module.transformer.h[1].mlp.dropout = torch.nn.Dropout(0.9)",
    "the attention": "model._module.config._attn_implementation = 'eager'",
}
"""Changes that a runner restores; the same process serves the next request."""


@pytest.mark.parametrize("code", WRITES.values(), ids=WRITES.keys())
def test_request_after_weight_write_gets_original_weights_and_new_process(
    site: Site, truth: torch.Tensor, code: str
) -> None:
    logits, process = site.run(code)
    assert not torch.equal(logits, truth), "the change has no effect on its own request"
    logits, next_process = site.run("")
    assert torch.equal(logits, truth)
    assert next_process != process


@pytest.mark.parametrize("code", RESTORED.values(), ids=RESTORED.keys())
def test_change_of_module_tree_is_undone_in_same_process(
    site: Site, truth: torch.Tensor, code: str
) -> None:
    _, process = site.run(code)
    assert site.run("")[1] == process
    assert torch.equal(site.run("")[0], truth)


@pytest.mark.parametrize(("changes", "tells"), SETTINGS.values(), ids=SETTINGS.keys())
def test_process_setting_is_restored_for_next_request(site: Site, changes: str, tells: str) -> None:
    before = site.says(tells)
    changed = site.saves(changes)["told"][0]
    assert site.says(tells) == before
    assert changed == before[0]


def test_a_setting_that_cannot_be_restored_ends_the_process(site: Site) -> None:
    tells = "import torch; said = torch.is_inference_mode_enabled()"
    process, _ = site.says(
        "import builtins, torch; builtins.mode = torch.inference_mode(); mode.__enter__()"
    )
    next_process, text = site.says(tells)
    assert not text
    assert next_process != process


def test_loaded_library_keeps_its_logger(site: Site) -> None:
    """Only users' loggers are removed: a library makes its logger once per process."""
    process, _ = site.says("import logging, wave; logging.getLogger('wave').setLevel(7)")
    values = site.says("import logging; said = logging.getLogger('wave').level")
    assert values == (process, 7)


def test_a_patched_class_ends_the_process(site: Site) -> None:
    _, process = site.run("type(model._module.lm_head).forward = lambda self, hidden: hidden * 2")
    _, next_process = site.run("assert type(model._module.lm_head).forward.__name__ == 'forward'")
    assert next_process != process


def test_hooks_do_not_accumulate_over_requests(site: Site, truth: torch.Tensor) -> None:
    values = [site.run(RESTORED["a hook"])[0] for _ in range(3)]
    assert not torch.equal(values[0], truth)
    assert all(torch.equal(logits, values[0]) for logits in values)


def test_each_request_gets_requested_attention(site: Site) -> None:
    expects = "assert model._module.config._attn_implementation == {!r}"
    for name in ("eager", "eager", "sdpa", "eager"):
        site.run(expects.format(name), attn_implementation=name)
    site.run(expects.format("sdpa"))


def test_adapter_process_is_reused_until_its_weights_change(
    site: Site, truth: torch.Tensor, tiny_adapter: Path
) -> None:
    adapted = {"peft": str(tiny_adapter)}
    logits, process = site.run("", **adapted)
    assert not torch.equal(logits, truth)
    assert torch.equal(site.run("")[0], truth)
    again, same_process = site.run("", **adapted)
    assert torch.equal(again, logits)
    assert same_process == process
    writes = (
        "for name, each in model._module.named_parameters():\n"
        "    if 'lora' in name: each.data.mul_(2)"
    )
    assert not torch.equal(site.run(writes, **adapted)[0], logits)
    again, other_process = site.run("", **adapted)
    assert torch.equal(again, logits)
    assert other_process != process


LEFT = "weights = list(model._module.parameters())\n"


def test_changes_invisible_in_logits_are_undone(site: Site) -> None:
    site.run(LEFT + "[each.requires_grad_(False) for each in weights]; model._module.train()")
    site.run(
        LEFT + "assert all(each.requires_grad for each in weights)\n"
        "assert not model._module.training\n"
        "model._module(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()\n"
        "assert weights[0].grad is not None; weights[0].note = 1"
    )
    site.run(LEFT + "assert weights[0].grad is None and not hasattr(weights[0], 'note')")


def test_failed_request_leaves_no_change(site: Site, truth: torch.Tensor) -> None:
    payload = executing(site.client, WEIGHT + "weight.data.zero_(); 1 / 0")
    assert site.wait(site.served.run(payload)).status is Status.ERROR
    assert torch.equal(site.run("")[0], truth)


def test_requests_without_writes_share_one_process(site: Site, truth: torch.Tensor) -> None:
    read = reading(site.client)
    processes = {site.run("")[1] for _ in range(3)}
    assert torch.equal(site.wait(site.served.logits(read)), truth)
    processes.add(site.run("model._module.generate(torch.zeros(1, 3, dtype=torch.long))")[1])
    processes.add(site.run("")[1])
    assert len(processes) == 1


def test_reset_fails_on_system_without_pagemap(
    tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner serves one request on such a system."""
    from ndif.runtime.generations import Generation
    from ndif.runtime.process import model_reset

    class Hidden:
        @staticmethod
        def open() -> None:
            raise FileNotFoundError("/proc/self/pagemap")

    monkeypatch.setattr(model_reset, "ProcFiles", Hidden)
    generation = Generation()
    generation.model = torch.nn.Module()
    generation.model._module = torch.nn.Linear(2, 2)
    monkeypatch.setattr(generation, "forget", lambda: None)
    reset = ModelReset(generation, None)
    reset.begin()
    with pytest.raises(ResetError, match="does not show"):
        reset()
