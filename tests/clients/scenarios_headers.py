"""Blocks of researchers with nnsight 0.7 and 0.6, run remotely and in this process, with equal values.

`scenario_07_…` and `scenario_06_…` run with one version only; their docstrings say why.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import io
import json
import linecache
import logging
import os
import sys
import tempfile
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# Once nnsight has put `.save` on every object, the definition of anyio's classes fails; an asynchronous
# client defines them at its first download.
import anyio._backends._asyncio  # noqa: F401
import httpx
import nnsight
import torch
import users_cached
import users_module
from comparing import AT_ONCE_S, assert_equal, frames, place, raised, until
from nnsight import CONFIG, LanguageModel, VisionLanguageModel
from nnsight.intervention import serialization
from nnsight.intervention.backends import remote as remote_backend
from nnsight.intervention.backends.remote import LocalTracer, RemoteBackend, RemoteException
from nnsight.intervention.tracing.base import Tracer
from nnsight.intervention.tracing.globals import Globals
from nnsight.modeling.transformers import TransformersModel
from scenarios_modules import *  # noqa: F403 - the worker finds them here
from torch.nn import functional
from transformers import AutoModelForCausalLM

PROMPT = "The Eiffel Tower is in the city of"
OTHER = "Madison Square Garden is in"
VISION = "VisionLanguageModel"
logger = logging.getLogger("researcher")
here = Path("notes.txt")
INLINE = 8 << 20
"""Largest result that the live channel carries (NDIF_MAX_INLINE_RESULT_BYTES)."""


class Context:
    """The model without weights for remote runs, and with weights for runs in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        # The client raises an error if it polls without a key.
        CONFIG.API.APIKEY = ""
        self.version = nnsight.__version__
        self.name = name
        self.remote = LanguageModel(name)
        self.local = LanguageModel(folder, dispatch=True)

    def same(self, block: Callable[[Any, bool], Any]) -> Any:
        """Run `block(model, remote)` remotely and locally; return the values, which must be equal."""
        remote, local = block(self.remote, True), block(self.local, False)
        assert_equal(remote, local)
        return remote


class Recorder(RemoteBackend):
    """A backend that records every response, and the form of its result."""

    def __init__(self, context: Context, **options: Any) -> None:
        super().__init__(context.remote.to_model_key(), **options)
        self.responses: list[tuple[str, str]] = []
        self.came: Any = None

    def handle_response(self, response: Any, tracer: Any = None) -> Any:
        """See `RemoteBackend`."""
        self.responses.append((response.status.value, response.description))
        return super().handle_response(response, tracer)

    def _fetch_result_if_url(self, result: Any) -> Any:
        self.came = result
        return super()._fetch_result_if_url(result)

    @property
    def statuses(self) -> list[str]:
        """Return the status of every response."""
        return [status for status, _ in self.responses]


def error_of(run: Callable[[], Any]) -> str:
    """Return the text of the RemoteException that `run` must raise."""
    error = raised(run, RemoteException)
    assert error.tb_string in str(error)
    return str(error.tb_string)


def polled(backend: RemoteBackend) -> Any:
    """Return the result of a job that was sent with `blocking=False`."""
    (result,) = until(
        lambda: [result for result in (backend(),) if result is not None],
        lambda: backend.job_status,
    )
    return result


def hidden_here(context: Context) -> torch.Tensor:
    """Return the local value of `model.transformer.h[1].output` for the prompt."""
    with context.local.trace(PROMPT):
        hidden = context.local.transformer.h[1].output.save()
    return hidden


# --- reads and edits -------------------------------------------------------------------------------


def scenario_reads_of_layers_and_logits(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            attention = model.transformer.h[1].attn.output[0].save()
            hidden = model.transformer.h[2].output.save()
            inputs = model.transformer.h[3].mlp.input.save()
            logits = model.lm_head.output[:, -1].save()
        return [hidden, attention, inputs, logits]

    context.same(block)


def scenario_plain_python_in_a_block(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        scale = 3
        with model.trace(PROMPT, remote=remote):
            norms = [].save()
            facts = {}.save()
            for index, layer in enumerate(model.transformer.h):
                hidden = layer.output
                norms.append(float(hidden.norm()) * scale)
                if index == 1:
                    facts.update(shape=tuple(hidden.shape), name=f"layer {index}", nothing=None)
            count = len(norms).save()
            word = model.tokenizer.decode(model.lm_head.output[0, -1].argmax()).save()
            also = nnsight.save(word)
        return [norms, facts, count, word, also]

    context.same(block)


def scenario_inputs_of_every_kind(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        tokens = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
        with model.trace([PROMPT, OTHER], remote=remote):
            batch = model.lm_head.output.save()
        with model.trace(tokens, remote=remote):
            tensor = model.lm_head.output.save()
        with model.trace({"input_ids": tokens}, remote=remote):
            mapping = model.output.logits.save()
        return [batch, tensor, mapping]

    context.same(block)


def scenario_in_place_edit(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            model.transformer.h[1].output[:, 2] = 0
            model.transformer.h[2].mlp.output[:] *= 2
            logits = model.lm_head.output.save()
        return logits

    edited = context.same(block)
    with context.local.trace(PROMPT):
        plain = context.local.lm_head.output.save()
    assert not torch.equal(edited, plain)


def scenario_replaced_output(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        shift = torch.full((64,), 0.5)
        with model.trace(PROMPT, remote=remote):
            model.transformer.h[0].output = model.transformer.h[0].output + shift
            logits = model.lm_head.output.save()
        return logits

    context.same(block)


def scenario_skip_a_module(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            before = model.transformer.h[0].output
            model.transformer.h[1].skip(before)
            logits = model.lm_head.output.save()
        return logits

    context.same(block)


def scenario_early_stop(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote) as tracer:
            hidden = model.transformer.h[0].output.save()
            tracer.stop()
        return hidden

    context.same(block)


def scenario_source_of_a_forward(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            inner = model.transformer.h[0].attn.source.attention_interface_0.output[0].save()
        with model.trace(PROMPT, remote=remote):
            model.transformer.h[0].attn.source.attention_interface_0.output[0][:] = 0
            logits = model.lm_head.output.save()
        return [inner, logits]

    context.same(block)
    # The next request does not use the rewritten forward.
    scenario_reads_of_layers_and_logits(context)


def scenario_source_named_within_its_forward(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        attention = model.transformer.h[0].attn
        attention.source
        with model.trace(PROMPT, remote=remote):
            attention.c_attn.output[:] = 1
            inner = attention.source.attention_interface_0.output[0].save()
        return inner

    context.same(block)


def scenario_module_called_ad_hoc(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output
            tokens = model.lm_head(model.transformer.ln_f(hidden)).argmax(-1).save()
        return tokens

    context.same(block)


def scenario_scan_is_local(context: Context) -> None:
    with context.remote.scan(PROMPT):
        shape = tuple(context.remote.transformer.h[0].output.shape)
        nnsight.save(shape)
    assert shape[-1] == 64


def scenario_scan_in_a_session(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            with model.scan(PROMPT):
                width = model.transformer.h[0].output.shape[-1]
            with model.trace(PROMPT):
                half = model.transformer.h[0].output[..., : width // 2].save()
        return half

    context.same(block)


# --- several inputs, several passes ------------------------------------------------------------------


def scenario_several_invokes(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(remote=remote) as tracer:
            with tracer.invoke(PROMPT):
                first = model.transformer.h[1].output[:, -1].save()
            with tracer.invoke([OTHER, PROMPT]):
                later = model.transformer.h[2].output
                later[:, -1] = first
                second = model.lm_head.output[:, -1].save()
            with tracer.invoke():
                both = model.lm_head.output[:, -1].save()
        return [first, second, both]

    context.same(block)


def scenario_barrier(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(remote=remote) as tracer:
            barrier = tracer.barrier(2)
            with tracer.invoke(PROMPT):
                embedded = model.transformer.wte.output
                barrier()
            with tracer.invoke(PROMPT):
                barrier()
                model.transformer.wte.output = embedded * 2
                logits = model.lm_head.output.save()
        return logits

    context.same(block)


def scenario_generate_all(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
            steps = [].save()
            for step in tracer.all():
                steps.append((step, model.lm_head.output[:, -1].argmax(-1)))
            tokens = tracer.result.save()
        return [steps, tokens]

    steps, tokens = context.same(block)
    assert len(steps) == 4
    assert tokens.shape[0] == 1


def scenario_generate_iter(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
            later = [].save()
            for _ in tracer.iter[1:3]:
                model.transformer.h[2].output[:] *= 2
                later.append(model.lm_head.output[:, -1])
            tokens = model.generator.output.save()
        return [later, tokens]

    later, _ = context.same(block)
    assert len(later) == 2


def scenario_generate_with_an_iterated_block(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=3, do_sample=False, remote=remote) as tracer:
            steps = [].save()
            with tracer.iter[:] as step:
                steps.append((step, model.lm_head.output[:, -1]))
        return steps

    assert len(context.same(block)) == 3


def scenario_06_generate_next(context: Context) -> None:
    """nnsight 0.7.0 saves nothing, locally, too: it asks for a later iteration before it counts them."""

    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=3, do_sample=False, remote=remote) as tracer:
            first = model.lm_head.output[:, -1].save()
            tracer.next()
            second = model.lm_head.output[:, -1].save()
            tracer.next()
            third = model.lm_head.output[:, -1].save()
        return [first, second, third]

    first, second, _ = context.same(block)
    assert not torch.equal(first, second)


def scenario_session_of_traces(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            with model.trace(PROMPT):
                hidden = model.transformer.h[0].output[:, -1].save()
            with model.trace(OTHER):
                model.transformer.h[0].output[:, -1] = hidden
                patched = model.lm_head.output[:, -1].save()
        return [hidden, patched]

    context.same(block)


def scenario_loop_in_a_session(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        prompts = [PROMPT, OTHER, PROMPT]
        with model.session(remote=remote):
            tops = [].save()
            for prompt in prompts:
                with model.trace(prompt):
                    tops.append(model.lm_head.output[0, -1].topk(3).indices)
        return tops

    assert len(context.same(block)) == 3


def traced(model: Any, prompt: str) -> torch.Tensor:
    """Run a trace in a function of the user's script."""
    with model.trace(prompt):
        last = model.lm_head.output[:, -1].save()
    return last


def scenario_a_function_with_a_trace_in_a_session(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            last = traced(model, PROMPT).save()
        return last

    context.same(block)


def scenario_06_a_function_with_a_trace_is_called_twice_in_a_session(context: Context) -> None:
    """nnsight 0.7.0 takes such a trace for the outermost and forgets earlier saved values, locally, too."""

    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            first = traced(model, PROMPT).save()
            two = traced(model, OTHER).save()
        return [first, two]

    context.same(block)


# --- gradients, caches, edits -------------------------------------------------------------------------


def scenario_gradients(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output
            hidden.requires_grad_(True)
            logits = model.lm_head.output
            with logits.sum().backward(retain_graph=True):
                first = hidden.grad.clone().save()
            with (logits * 2).sum().backward():
                second = hidden.grad.clone().save()
        return [first, second]

    first, _ = context.same(block)
    assert first.abs().sum() > 0


def scenario_weights_keep_no_gradient(context: Context) -> None:
    model = context.remote
    with model.trace(PROMPT, remote=True):
        model.lm_head.output.sum().backward()
        has = (model.lm_head.weight.grad is not None).save()
    with model.trace(PROMPT, remote=True):
        kept = (model.lm_head.weight.grad is not None).save()
    assert has
    assert not kept


def cached(model: Any, remote: bool) -> Any:
    """Return the outputs of two modules, from a cache."""
    with model.trace(PROMPT, remote=remote) as tracer:
        cache = tracer.cache(modules=[model.transformer.h[0], model.transformer.h[2].mlp]).save()
    return {path: entry.output for path, entry in cache.items()}


def scenario_07_cache(context: Context) -> None:
    assert len(context.same(cached)) == 2


def scenario_06_cache_cannot_be_read_by_its_client(context: Context) -> None:
    """nnsight 0.6.3 recurses without end: it reads an attribute of a cache during unpickling."""
    raised(lambda: cached(context.remote, True), RecursionError)
    scenario_reads_of_layers_and_logits(context)


def scenario_06_a_release_before_063_sends_no_first_line(context: Context) -> None:
    pickler = serialization.CustomCloudPickler
    reduce = pickler._dynamic_function_reduce

    def without_line(self: Any, function: Any) -> tuple[Any, ...]:
        make, arguments, *others = reduce(self, function)
        return (make, arguments[:-1], *others)

    pickler._dynamic_function_reduce = without_line
    try:
        scenario_reads_of_layers_and_logits(context)
    finally:
        pickler._dynamic_function_reduce = reduce


def scenario_edit_that_lasts(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.edit() as edited:
            model.transformer.h[1].mlp.output[:] = 0
        with edited.trace(PROMPT, remote=remote):
            with_edit = edited.lm_head.output.save()
        with model.trace(PROMPT, remote=remote):
            without = model.lm_head.output.save()
        return [with_edit, without]

    with_edit, without = context.same(block)
    assert not torch.equal(with_edit, without)


def scenario_edit_in_a_session(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            with model.edit() as edited:
                model.transformer.h[1].mlp.output[:] = 0
            with edited.trace(PROMPT):
                logits = edited.lm_head.output.save()
        return logits

    context.same(block)


# --- code that travels ---------------------------------------------------------------------------------


def doubled(value: torch.Tensor) -> torch.Tensor:
    """A function of the user's script."""
    return value * 2


class Probe:
    """A class of the user's script, saved as a result."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def top(self) -> int:
        """The index of the largest value."""
        return int(self.values.argmax())


def scenario_functions_travel_by_value(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        halved = lambda value: value / 2  # noqa: E731
        with model.trace(PROMPT, remote=remote):

            def shifted(value: torch.Tensor) -> torch.Tensor:
                return value + 1

            hidden = shifted(doubled(halved(model.transformer.h[0].output))).save()
        return hidden

    context.same(block)


class Gain(torch.nn.Module):
    """A module of the script whose methods all call `super()`."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("gain", torch.tensor(gain))
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.gain * self.one

    def __getattr__(self, name: str) -> Any:
        return 1 if name == "one" else super().__getattr__(name)


class Shifted(Gain):
    """A class that adds to another one, with methods that torch's contexts decorate."""

    factor = 2

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) + 1

    @torch.no_grad()
    def doubled(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value) * Shifted.factor * self.weight

    @torch.inference_mode()
    def halved(self, value: torch.Tensor) -> torch.Tensor:
        return functional.relu(value) / 2


def scenario_classes_that_use_super(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        sent = Shifted(2.0)

        def scaled(value: torch.Tensor) -> torch.Tensor:
            return sent(value) * 0.5

        with model.trace(PROMPT, remote=remote):
            hidden = scaled(model.transformer.h[0].output)
            made = Shifted(3.0)
            found = nnsight.save([hidden, made(hidden), made.gain, sent.halved(hidden)])
            found += [sent.doubled(hidden), sent.doubled(hidden).requires_grad]
        return found

    context.same(block)


def scenario_a_users_module_travels(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = users_module.centred(model.transformer.h[0].output).save()
        return hidden

    context.same(block)

    def cached() -> None:
        weight = users_cached.weight
        with context.remote.trace(PROMPT, remote=True):
            (context.remote.transformer.h[0].output[0] * weight(1)).save()

    message = error_of(cached)
    assert "'weight' alone, as of a function with functools.cache" in message, message


def scenario_a_users_object_travels_both_ways(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        given = Probe(torch.arange(4))
        with model.trace(PROMPT, remote=remote):
            top = given.top().save()
            probe = Probe(model.lm_head.output[0, -1].detach()).save()
        assert isinstance(probe, Probe)
        return [top, probe.values, probe.top()]

    assert context.same(block)[0] == 3


def scenario_a_view_is_not_sent_with_its_storage(context: Context) -> None:
    backend = Recorder(context, blocking=False)
    with context.remote.trace(PROMPT * 20, backend=backend):
        row = context.remote.lm_head.output[0, -1].save()
    row = polled(backend)["row"]
    assert backend.came[1] < 8 * row.numel() * row.element_size()


def scenario_an_edited_script_is_not_confused_with_the_last(context: Context) -> None:
    """Two sources with one file name and line, as in a script that is edited between runs."""
    for factor in (2, 3):
        source = (
            "with model.session(remote=True):\n"
            "    with model.trace(PROMPT):\n"
            f"        hidden = (model.transformer.h[1].output * {factor}).save()\n"
        )
        # Each run of the script is a new client.
        Globals.cache.clear()
        linecache.cache["script.py"] = (len(source), None, source.splitlines(True), "script.py")
        scope: dict[str, Any] = {"model": context.remote, "PROMPT": PROMPT}
        exec(compile(source, "script.py", "exec"), scope)
        assert_equal(scope["hidden"], hidden_here(context) * factor)


# --- hints -------------------------------------------------------------------------------------------


def logged(backend: Recorder) -> list[str]:
    """Return the LOG lines that a job's client got."""
    return [text for status, text in backend.responses if status == "LOG"]


def scenario_a_list_outside_the_block_is_filled(context: Context) -> None:
    model, backend = context.remote, Recorder(context)
    results: list[Any] = []
    counter = [0]
    with model.trace(PROMPT, backend=backend):
        results.append(model.lm_head.output + counter[0])
    assert results == []
    [line] = logged(backend)
    assert "filled 'results'" in line, line
    assert "`results = [].save()`" in line


def scenario_nothing_is_saved(context: Context) -> None:
    model, backend = context.remote, Recorder(context)
    with model.trace(PROMPT, backend=backend):
        for layer in model.transformer.h:
            hidden = layer.output
    [line] = logged(backend)
    assert "saved nothing" in line, line
    assert "`hidden = hidden.save()`" in line


# --- how a job is waited for --------------------------------------------------------------------------


def polled_before_its_end(context: Context) -> RemoteBackend:
    """Return a job whose client polled while it ran; a busy client may need a longer job for that."""
    for seconds in (1, 8, 64):
        with context.remote.trace(PROMPT, remote=True, blocking=False) as tracer:
            time.sleep(seconds)
            hidden = context.remote.transformer.h[1].output.save()
        backend: RemoteBackend = tracer.backend
        assert backend.job_id
        assert backend.job_status.value == "RECEIVED"
        if backend() is None:
            break
    return backend


def scenario_non_blocking(context: Context) -> None:
    backend = polled_before_its_end(context)
    assert backend.job_status.value in ("RECEIVED", "QUEUED", "DISPATCHED", "RUNNING")
    assert_equal(polled(backend), {"hidden": hidden_here(context)})
    assert backend.job_status.value == "COMPLETED"
    # Another process needs only the id, and may poll repeatedly.
    for _ in range(2):
        again = RemoteBackend(context.remote.to_model_key(), blocking=False, job_id=backend.job_id)
        assert_equal(again(), {"hidden": hidden_here(context)})


def scenario_non_blocking_session(context: Context) -> None:
    with context.remote.session(remote=True, blocking=False) as tracer:
        last = traced(context.remote, PROMPT).save()
    assert_equal(polled(tracer.backend)["last"], traced(context.local, PROMPT))


def scenario_non_blocking_error(context: Context) -> None:
    with context.remote.trace(PROMPT, remote=True, blocking=False) as tracer:
        context.remote.transformer.h[1].output.save()
        {}["missing"]
    message = error_of(lambda: polled(tracer.backend))
    assert message.endswith("KeyError: 'missing'"), message


def scenario_poll_of_an_unknown_job(context: Context) -> None:
    backend = RemoteBackend(
        context.remote.to_model_key(),
        blocking=False,
        job_id="00000000-0000-4000-8000-000000000000",
    )
    assert "is known here" in str(raised(backend, Exception))


@contextlib.contextmanager
def entered() -> Iterator[None]:
    """Repair a client of 0.7.0, which does not find an `async with`; 0.6.3 stays unchanged.

    The released client takes the first frame above frames named `__enter__` for the user's frame. Its own
    frame named `__aenter__` is between them.
    """
    entering = Tracer.__aenter__
    code = entering.__code__
    entering.__code__ = code.replace(co_name="__enter__")
    try:
        yield
    finally:
        entering.__code__ = code


@entered()
def scenario_asynchronous(context: Context) -> None:
    """Sessions, each with its own live channel; `async with model.trace` fails in both client versions.

    A trace forgets its model before it makes its request.
    """
    model = context.remote

    async def send_one(factor: int) -> Any:
        async with model.session(remote=True):
            with model.trace(PROMPT):
                hidden = (model.transformer.h[1].output * factor).save()
        return hidden

    async def several() -> Any:
        return await asyncio.gather(*(send_one(factor) for factor in range(1, 4)))

    for factor, hidden in enumerate(asyncio.run(several()), start=1):
        assert_equal(hidden, hidden_here(context) * factor)


@entered()
def scenario_asynchronous_error(context: Context) -> None:
    model = context.remote

    async def run() -> None:
        async with model.session(remote=True):
            with model.trace(PROMPT):
                {}["missing"]

    # An awaited error bypasses the client's code that wraps errors.
    message = str(raised(lambda: asyncio.run(run()), RemoteException))
    assert frames(message) == [place(run, "PROMPT"), place(run, "missing")], message


def scenario_names_that_are_not_used(context: Context) -> None:
    """Names that a block does not use cause no refusal, and a logger writes to the LOG."""
    backend = Recorder(context)
    with context.remote.trace(PROMPT, backend=backend):
        hidden = context.remote.transformer.h[1].output.save()
        if hidden.isnan().any():
            here.read_text()
        logger.warning("seen %d", hidden.ndim)
    assert_equal(hidden, hidden_here(context))
    [line] = [text for status, text in backend.responses if status == "LOG"]
    assert line.endswith("seen 3"), line


def scenario_a_function_that_torch_decorates(context: Context) -> None:
    @torch.no_grad()
    def centred(value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return value - value.mean(), torch.is_grad_enabled()

    @torch.inference_mode()
    def doubled(values: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for value in values:
            yield value * 2

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden, enabled = centred(model.transformer.h[0].output)
            found = hidden.save()
            twice = nnsight.save([value.clone() for value in doubled([hidden, found])])
            grad = nnsight.save([enabled, torch.is_grad_enabled()])
        return [found, twice, grad]

    assert context.same(block)[2] == [False, True]


def scenario_what_a_block_puts_into_a_list_comes_back(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        hidden: list[torch.Tensor] = []
        by_layer: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        untouched = [1]
        for _ in range(2):
            with model.trace(PROMPT, remote=remote) as tracer:
                for index, layer in enumerate(model.transformer.h[:2]):
                    output = layer.output
                    hidden.append(output.save())
                    by_layer[index].append(output[:, -1].save())
                assert untouched == [1]
                tracer.stop()
        assert len(hidden) == 4
        return [hidden, by_layer, untouched]

    context.same(block)


@entered()
def scenario_a_large_result_of_an_asynchronous_session(context: Context) -> None:
    """The client fetches it with `async_get_result`."""
    model = context.remote

    async def run() -> Any:
        async with model.session(remote=True):
            with model.trace(PROMPT):
                large = model.transformer.h[1].output.repeat(1, 20000, 1).save()
        return large

    assert_equal(asyncio.run(run()), hidden_here(context).repeat(1, 20000, 1))


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A user's web server: yields its address, and the requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            signed = self.headers["webhook-signature"].startswith("v1,")
            asked.append(f"{self.path} {body['status']} {body['id']} {signed}")
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()  # otherwise its thread would poll the closed socket without a pause


def query(path: str) -> dict[str, str]:
    """Return the query parameters of a path."""
    return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(path).query))


def scenario_callback(context: Context) -> None:
    model = context.remote
    with listening() as (url, asked):
        completed = Recorder(context, blocking=False, callback=f"{url}/done")
        with model.trace(PROMPT, backend=completed):
            hidden = model.transformer.h[1].output.save()
        until(lambda: len(asked) == 1)
        # The result exists before the webhook is delivered.
        assert_equal(completed()["hidden"], hidden_here(context))
        failed = Recorder(context, blocking=False, callback=f"{url}/failed")
        with model.trace(PROMPT, backend=failed):
            model.transformer.h[1].output.save()
            {}["missing"]
        until(lambda: len(asked) == 2)
    assert [path.partition("?")[0] for path in asked] == ["/done", "/failed"]
    assert query(asked[0]) == {"status": "COMPLETED", "id": completed.job_id}
    assert query(asked[1]) == {"status": "ERROR", "id": failed.job_id}


def scenario_callback_at_every_status(context: Context) -> None:
    with listening() as (url, asked):
        backend = Recorder(context, blocking=False, callback=f"every+{url}/")
        with context.remote.trace(PROMPT, backend=backend):
            context.remote.transformer.h[1].output.save()
        until(lambda: {"RUNNING", "COMPLETED"} <= {query(path)["status"] for path in asked})
    updates = [query(path) for path in asked]
    assert {update["id"] for update in updates} == {backend.job_id}
    statuses = [update["status"] for update in updates]
    assert len(statuses) == len({*statuses}), statuses


def scenario_callback_by_a_signed_post(context: Context) -> None:
    with listening() as (url, asked):
        backend = Recorder(context, blocking=False, callback=f"post+{url}/done?run=7")
        with context.remote.trace(PROMPT, backend=backend):
            context.remote.transformer.h[1].output.save()
        until(lambda: len(asked) == 1)
        assert backend() is not None
    assert asked == [f"/done?run=7 COMPLETED {backend.job_id} True"]


def scenario_callback_with_a_query_of_its_own(context: Context) -> None:
    with listening() as (url, asked):
        backend = Recorder(context, callback=f"{url}/done?run=7")
        with context.remote.trace(PROMPT, backend=backend):
            hidden = context.remote.transformer.h[1].output.save()
        until(lambda: len(asked) == 1)
    assert query(asked[0]) == {"run": "7", "status": "COMPLETED", "id": backend.job_id}


def scenario_a_callback_that_fails_harms_nobody(context: Context) -> None:
    backend = Recorder(context, callback="http://127.0.0.1:9/closed")
    with context.remote.trace(PROMPT, backend=backend):
        hidden = context.remote.transformer.h[1].output.save()
    assert_equal(hidden, hidden_here(context))


def scenario_statuses_in_order(context: Context) -> None:
    backend = Recorder(context)
    with context.remote.trace(PROMPT, backend=backend):
        print("from the block")
        hidden = context.remote.transformer.h[1].output.save()
    # The client of a young job is sent only its latest status, and before the job's output.
    before = [status for status in ("QUEUED", "DISPATCHED") if status in backend.statuses]
    expected = ["RECEIVED", *before, "RUNNING", "LOG", "COMPLETED"]
    assert [*dict.fromkeys(backend.statuses)] == expected, backend.responses
    assert logged(backend) == ["from the block"]
    assert all(description for _, description in backend.responses)
    assert backend.job_id
    assert backend.job_status.value == "COMPLETED"
    assert_equal(hidden, hidden_here(context))


def scenario_the_address_of_the_server(context: Context) -> None:
    """The address is an argument of a backend; both client versions would call the text of a `backend="http://…"`."""
    host = CONFIG.API.HOST
    CONFIG.API.HOST = "http://127.0.0.1:9"
    try:
        backend = Recorder(context, host=host, api_key="mine")
        with context.remote.trace(PROMPT, backend=backend):
            hidden = context.remote.transformer.h[1].output.save()
    finally:
        CONFIG.API.HOST = host
    assert_equal(hidden, hidden_here(context))


def scenario_what_the_user_sees(context: Context) -> None:
    """The client shows one line per status, and a block's prints, warnings and stderr."""
    shown = io.StringIO()
    CONFIG.APP.REMOTE_LOGGING = True
    try:
        backend = RemoteBackend(context.remote.to_model_key(), verbose=True)
    finally:
        CONFIG.APP.REMOTE_LOGGING = False

    def run() -> None:
        with context.remote.trace(PROMPT, backend=backend):
            print("the shape is", tuple(context.remote.lm_head.output.shape))
            print("two\nlines")
            print("for stderr", file=sys.stderr)
            warnings.warn("careful", stacklevel=1)

    with contextlib.redirect_stdout(shown):
        run()
    text = shown.getvalue()
    assert "[RemoteBackend] Payload: " in text
    lines = text.replace("\r\x1b[K", "\n").splitlines()
    printed = ["the shape is (1, 8, 309)", "two", "lines", "for stderr", "UserWarning: careful"]
    # Lines that wait for the client's acknowledgement of an earlier line are sent together.
    logs = [
        line for text_line in lines if (line := text_line.split(" LOG ")[-1].strip()) in printed
    ]
    assert logs == printed, text
    assert f"[{backend.job_id}] COMPLETED " in text
    for status in ("RECEIVED", "RUNNING"):
        assert f"[{backend.job_id}] {status}" in text, text


# --- how a result comes --------------------------------------------------------------------------------


@contextlib.contextmanager
def uncompressed() -> Iterator[None]:
    """Set `CONFIG.API.COMPRESS = False`, as in the user's configuration."""
    CONFIG.API.COMPRESS = False
    try:
        yield
    finally:
        CONFIG.API.COMPRESS = True


def small_result(context: Context) -> None:
    """Check that a small result comes in the live channel."""
    backend = Recorder(context)
    with context.remote.trace(PROMPT, backend=backend):
        hidden = context.remote.transformer.h[1].output.save()
    assert isinstance(backend.came, dict), backend.came
    assert_equal(hidden, hidden_here(context))


def large_result(context: Context) -> None:
    """Check that a large result is fetched from an address, and that its size is sent with the address."""

    def again() -> list[bytes]:
        """Return the result as sent; [] if it was deleted before a busy client could fetch it again."""
        backend = Recorder(context)
        with context.remote.trace(PROMPT, backend=backend):
            large = context.remote.transformer.h[1].output.repeat(1, 20000, 1).save()
        url, size = backend.came
        answer = httpx.get(url)
        assert large.numel() * large.element_size() > 2 * INLINE
        assert_equal(large, hidden_here(context).repeat(1, 20000, 1))
        if answer.status_code == httpx.codes.NOT_FOUND:
            return []
        assert len(answer.content) == size
        return [answer.content]

    (content,) = until(again)
    assert content.startswith(b"\x28\xb5\x2f\xfd" if CONFIG.API.COMPRESS else b"PK")


def scenario_a_small_result_comes_at_once(context: Context) -> None:
    small_result(context)


def scenario_a_large_result_is_fetched(context: Context) -> None:
    large_result(context)


def scenario_without_compression(context: Context) -> None:
    with uncompressed():
        small_result(context)
        large_result(context)
        scenario_non_blocking(context)


# --- hybrid jobs --------------------------------------------------------------------------------------


@contextlib.contextmanager
def fixed_local() -> Iterator[None]:
    """Repair `tracer.local()`, which fails in released clients.

    They load a streamed function with `load(data, model)`, which evaluates `model or {}`. An Envoy has no
    length, so this is a TypeError. Without that error, `load` would still need a mapping of persistent
    objects, and an Envoy is none. Only this line has to change.
    """
    load = serialization.load

    def load_with_objects(data: bytes, model: Any) -> Any:
        return load(data, {} if model is None else model._remoteable_persistent_objects())

    remote_backend.load = load_with_objects
    try:
        yield
    finally:
        remote_backend.load = load
        assert LocalTracer._send is None


@fixed_local()
def scenario_hybrid_session(context: Context) -> None:
    model = context.remote
    with model.session(remote=True) as session:
        with model.trace(PROMPT):
            hidden = model.transformer.h[1].output
        with session.local():
            shifted = hidden + 1
            where = os.getpid()
            shifted.remote()
            where.remote()
        with model.trace(PROMPT):
            back = (model.transformer.h[1].output - shifted).save()
        ran_in = int(where).save()
    assert ran_in == os.getpid()
    assert_equal(back, hidden_here(context) - (hidden_here(context) + 1))


@fixed_local()
def scenario_hybrid_trace(context: Context) -> None:
    model = context.remote
    backend = Recorder(context)
    with model.trace(PROMPT, backend=backend) as tracer:
        hidden = model.transformer.h[1].output
        with tracer.local():
            doubled_here = hidden * 2
            where = os.getpid()
            doubled_here.remote()
            where.remote()
        model.transformer.h[1].output = doubled_here
        logits = model.lm_head.output.save()
        ran_in = int(where).save()
    with context.local.trace(PROMPT):
        context.local.transformer.h[1].output = context.local.transformer.h[1].output * 2
        expected = context.local.lm_head.output.save()
    assert ran_in == os.getpid()
    assert_equal(logits, expected)
    assert backend.statuses[-2:] == ["STREAM", "COMPLETED"], backend.statuses


@fixed_local()
def scenario_hybrid_with_large_values(context: Context) -> None:
    """16 MiB each way: more than Socket.IO's default limit of 1 MB, and than an inline result."""
    model = context.remote
    with model.session(remote=True) as session:
        numbers = torch.arange(1 << 21)
        with session.local():
            flipped = numbers.flip(0)
            flipped.remote()
        total = int((flipped * numbers).sum()).save()
    numbers = torch.arange(1 << 21)
    assert total == int((numbers.flip(0) * numbers).sum())


@fixed_local()
def scenario_hybrid_whose_local_part_fails(context: Context) -> None:
    """The client raises the error; the server, which waits for an answer, is free at once."""
    model = context.remote

    def run() -> None:
        with model.session(remote=True) as session:
            values = torch.ones(2)
            with session.local():
                found = values[7]
                found.remote()
            total = found.sum().save()

    raised(run, IndexError)
    began = time.monotonic()
    scenario_reads_of_layers_and_logits(context)
    assert time.monotonic() - began < AT_ONCE_S


# --- errors -------------------------------------------------------------------------------------------


def own_frames(message: str) -> list[tuple[str, int, str, str]]:
    """Return the frames of a traceback, which must not show the server's files."""
    assert message.startswith("Traceback (most recent call last):\n"), message
    for secret in ("site-packages", "<nnsight", "src/ndif/", "nnsight/"):
        assert secret not in message, message
    return frames(message)


def scenario_an_error_names_the_users_line(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output.save()

            # a comment, and a mistake
            found = {"a": 1}["b"]

    message = error_of(run)
    assert own_frames(message) == [place(run, '["b"]')], message
    assert message.endswith("\nKeyError: 'b'"), message


def scenario_an_error_of_torchs(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output
            hidden @ torch.ones(3, 3)  # the user's mistake

    message = error_of(run)
    assert own_frames(message) == [place(run, "torch.ones")], message
    assert "\nRuntimeError: mat1 and mat2 shapes cannot be multiplied" in message


def scenario_an_error_in_the_model_names_the_users_lines(context: Context) -> None:
    model = context.remote

    def waits() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output = torch.ones(2, 3)  # the user's mistake
            logits = model.lm_head.output.save()

    message = error_of(waits)
    assert "\nRuntimeError: " in message, message
    expected = [place(waits, "torch.ones"), place(waits, "logits")]
    assert own_frames(message)[-2:] == expected, message

    def ends() -> None:
        with model.session(remote=True):
            wrong = torch.ones(2, 3)
            with model.trace(PROMPT):
                model.transformer.h[2].mlp.output = wrong

    message = error_of(ends)
    assert own_frames(message)[-1] == place(ends, "mlp.output"), message

    def invokes() -> None:
        with model.trace(remote=True) as tracer:
            with tracer.invoke(PROMPT):
                ratio = model.transformer.h[0].output.std()
            with tracer.invoke(OTHER):
                model.transformer.h[1].output
                replace(model.transformer.h[2], ratio)

    message = error_of(invokes)
    expected = [place(invokes, "replace"), place(replace, "torch.ones")]
    assert own_frames(message)[-2:] == expected, message

    def caught() -> None:
        """Catch one error and raise another: the second one's text must not mention the first."""
        with model.session(remote=True):
            wrong = torch.ones(2, 3)
            try:
                with model.trace(PROMPT):
                    model.transformer.h[2].mlp.output = wrong
            except RuntimeError:
                with model.trace(PROMPT):
                    model.lm_head.output.save()
                {}["missing"]

    message = error_of(caught)
    assert "while your block was here" not in message, message


def replace(layer: Any, ratio: Any) -> None:
    """Replace a layer's output with one that the next layer rejects."""
    layer.output = torch.ones(2, 3) * ratio


def scenario_an_error_in_an_invoke(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(remote=True) as tracer:
            with tracer.invoke(PROMPT):
                model.lm_head.output.save()
            with tracer.invoke(OTHER):
                model.lm_head.output.save()
                raise ValueError("in the second")

    message = error_of(run)
    assert own_frames(message) == [place(run, "in the second")], message


def scenario_an_error_in_a_loop_over_tokens(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.generate(PROMPT, max_new_tokens=3, remote=True) as tracer:
            for step in tracer.iter[:]:
                if step == 1:
                    model.lm_head.output[:, :, 10**9]

    message = error_of(run)
    assert own_frames(message) == [place(run, "10**9")], message


def scenario_an_error_in_a_gradient(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output
            hidden.requires_grad_(True)
            with model.lm_head.output.sum().backward():
                hidden.grad.view(1, 2, 3, 4)

    message = error_of(run)
    assert own_frames(message) == [place(run, "view(1")], message


def scenario_an_error_in_a_users_function(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            users_module.fails(model.transformer.h[0].output)

    message = error_of(run)
    expected = [place(run, "fails("), place(users_module.fails, "raise KeyError")]
    assert own_frames(message) == expected, message
    assert message.endswith("\nKeyError: 'no such probe'"), message


def scenario_an_error_in_a_method(context: Context) -> None:
    model = context.remote

    def run() -> None:
        probe = Probe(torch.tensor([]))
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            probe.top()

    message = error_of(run)
    assert own_frames(message) == [place(run, "top()"), place(Probe.top, "argmax")], message


def scenario_an_error_in_a_session(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.session(remote=True):
            with model.trace(PROMPT):
                model.transformer.h[0].output.save()
            with model.trace(OTHER):
                model.transformer.h[0].output.save()
                {}["missing"]

    message = error_of(run)
    assert own_frames(message) == [place(run, "OTHER"), place(run, "missing")], message
    assert message.endswith("\nKeyError: 'missing'"), message


def scenario_a_module_asked_for_too_late(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            later = model.transformer.h[2].output.save()
            sooner = model.transformer.h[1].output.save()

    message = error_of(run)
    assert own_frames(message) == [place(run, "sooner")], message
    assert "Did you call an Envoy out of order?" in message


def scenario_a_block_that_exits(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            raise SystemExit(3)

    message = error_of(run)
    assert own_frames(message) == [place(run, "SystemExit")], message
    assert message.endswith("\nSystemExit: 3"), message
    scenario_reads_of_layers_and_logits(context)


def scenario_a_session_that_exits(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.session(remote=True):
            raise SystemExit(3)

    assert "SystemExit: 3" in error_of(run)
    scenario_reads_of_layers_and_logits(context)


def scenario_a_segfault_costs_one_request(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            import ctypes

            model.transformer.h[0].output.save()
            ctypes.string_at(0)

    began = time.monotonic()
    message = error_of(run)
    assert "SIGSEGV" in message, message
    assert time.monotonic() - began < AT_ONCE_S
    scenario_reads_of_layers_and_logits(context)


def scenario_a_process_that_ends_itself_costs_one_request(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            os._exit(0)

    message = error_of(run)
    assert "exit code 0" in message, message
    scenario_reads_of_layers_and_logits(context)


def scenario_what_cannot_be_sent_is_said(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            lock = threading.Lock()
            model.transformer.h[0].output.save()
            nnsight.save(lock)

    message = error_of(run)
    assert "could not be sent" in message, message
    assert "Save tensors" in message


def scenario_a_model_the_server_lacks(context: Context) -> None:
    backend = RemoteBackend(context.remote.to_model_key().replace("tiny-gpt2", "other"))

    def run() -> None:
        with context.remote.trace(PROMPT, backend=backend):
            context.remote.transformer.h[0].output.save()

    message = str(raised(run, ConnectionError))
    assert "serves 'test-org/tiny-gpt2', not 'test-org/other'" in message, message


def scenario_a_version_the_server_lacks(context: Context) -> None:
    class Old(RemoteBackend):
        def request(self, tracer: Any) -> Any:
            data, headers = super().request(tracer)
            return data, {**headers, "nnsight-version": "0.5.10"}

    def run() -> None:
        with context.remote.trace(PROMPT, backend=Old(context.remote.to_model_key())):
            context.remote.transformer.h[0].output.save()

    message = str(raised(run, ConnectionError))
    assert "yours is 0.5.10" in message, message


def scenario_the_class_of_a_model(context: Context) -> None:
    def run(model: Any) -> torch.Tensor:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output.save()
        return hidden

    base = TransformersModel(context.name, automodel=AutoModelForCausalLM)
    assert base.to_model_key().startswith("nnsight.modeling.huggingface.HuggingFaceModel:")
    with base.trace(
        context.remote.tokenizer(PROMPT, return_tensors="pt")["input_ids"], remote=True
    ):
        hidden = base.transformer.h[0].output.save()
    assert_equal(hidden, run(context.remote))

    class Mine(LanguageModel):
        pass

    mine = Mine(context.name)
    assert mine.to_model_key() == context.remote.to_model_key()
    assert_equal(run(mine), hidden)

    # The key of a model with images; this model cannot be made of that class.
    key = VisionLanguageModel._remoteable_model_key
    assert (key.__module__, key.__qualname__.split(".")[0]) == ("nnsight.modeling.vlm", VISION)
    vision = mine.to_model_key().replace("language.LanguageModel", f"vlm.{VISION}")

    def send_as_vision() -> None:
        with mine.trace(PROMPT, backend=RemoteBackend(vision)):
            mine.transformer.h[0].output.save()

    message = str(raised(send_as_vision, ConnectionError))
    assert "made with nnsight's LanguageModel, not" in message, message
    assert f"not with 'nnsight.modeling.vlm.{VISION}'. Make" in message, message
    assert "With nnsight 0.8" in message, message


# --- what clients ask about the server ------------------------------------------------------------------


def scenario_status(context: Context) -> None:
    status = nnsight.status()
    assert status.status.value == "UP"
    entry = status[context.name]
    assert entry["repo_id"] == context.name
    assert entry["revision"] == "main"
    assert entry["state"].value == "RUNNING"
    assert entry["type"].value == "Dedicated"
    assert context.name in str(status)
    assert "Up" in str(status)
    assert nnsight.ndif_status().keys() == status.keys()
    assert nnsight.status(raw=True)["deployments"]
    assert nnsight.is_model_running(context.name)
    assert nnsight.is_model_running(context.name, revision="main")
    assert not nnsight.is_model_running(context.name, revision="another")


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Hide the nnsight below this client's overlay: a user has only one nnsight."""
    below = Path(httpx.__file__).parents[1]
    path = sys.path
    with tempfile.TemporaryDirectory() as folder:
        for entry in below.iterdir():
            if not entry.name.startswith("nnsight"):
                Path(folder, entry.name).symlink_to(entry)
        sys.path = [folder if place == str(below) else place for place in path]
        try:
            yield
        finally:
            sys.path = path


def scenario_comparison(context: Context) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), by_itself():
        nnsight.compare()
    text = shown.getvalue()
    assert f"Local:  {sys.version.split()[0]}" in text
    assert f"Remote: {sys.version.split()[0]} ✓" in text
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()]
    packages = {row[0]: row[1:] for row in rows if len(row) == 4}
    # The version of the package: PyPI's build of torch calls itself 2.13.0+cu130, and its package 2.13.0.
    installed = importlib.metadata.version("torch")
    assert packages["torch"] == [installed, installed, "✓"]
    assert packages["accelerate"][2] == "✓"
    # The server has 0.7, too, and a client of 0.6 sends the same request.
    newest = context.version.startswith("0.7")
    assert packages["nnsight"] == [context.version, "0.7.0", "✓" if newest else "⚠ CRITICAL"]
    assert {row[2] for name, row in packages.items() if name != "nnsight"} == {"✓"}, text
    for generation, version in (("0.8", "0.8"), ("0.7", "0.7"), ("0.6", "0.6.3")):
        url = f"{os.environ['NDIF_HOST']}/env?generation={generation}"
        assert httpx.get(url).json()["packages"]["nnsight"].startswith(version)
    missing = httpx.get(f"{os.environ['NDIF_HOST']}/env?generation=0.5")
    assert (missing.status_code, missing.json()["detail"]) == (
        404,
        "nnsight 0.5 is not installed here; 0.8, 0.7, 0.6 is.",
    )
