"""Blocks of researchers with nnsight 0.8, run remotely and in this process: the values must be equal."""

from __future__ import annotations

import asyncio
import collections
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import nnsight
import torch
import users_cached
import users_module
from comparing import AT_ONCE_S, assert_equal, raised, until
from nnsight import LanguageModel, TransformersModel, VisionLanguageModel
from nnsight.intervention.backends.remote import AsyncRemoteBackend, RemoteBackend, RemoteError
from nnsight.schema.config import CONFIG
from nnsight.schema.response import Status
from scenarios_modules import *  # noqa: F403 - the worker finds them here

PROMPT = "The Eiffel Tower is in the city of"
OTHER = "Madison Square Garden is in"


class Context:
    """The model without weights for remote runs, and with weights for runs in this process."""

    def __init__(self, name: str, folder: str) -> None:
        CONFIG.APP.REMOTE_LOGGING = False
        self.name = name
        self.folder = folder
        self.remote = TransformersModel(name, task="text-generation")
        self.local = TransformersModel(folder, task="text-generation", dispatch=True)

    def same(self, block: Callable[[Any, bool], Any]) -> Any:
        """Run `block(model, remote)` remotely and locally; return the values, which must be equal."""
        remote, local = block(self.remote, True), block(self.local, False)
        assert_equal(remote, local)
        return remote


def error_of(run: Callable[[], Any]) -> str:
    """Return the message of the RemoteError that `run` must raise."""
    return str(raised(run, RemoteError))


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
        scale, properties = 3, {}
        with model.trace(PROMPT, remote=remote):
            norms = [].save()
            for index, layer in enumerate(model.transformer.h):
                norms.append(float(layer.output.norm()) * scale)
                if index == 1:
                    properties = {
                        "shape": tuple(layer.output.shape),
                        "name": f"layer {index}",
                    }.save()
            count = len(norms).save()
        return [norms, properties, count]

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
            activated = model.transformer.h[0].mlp.source.self_act_0.output.save()
        return activated

    context.same(block)


def scenario_source_named_within_its_forward(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        attention = model.transformer.h[0].attn
        attention.source
        with model.trace(PROMPT, remote=remote):
            attention.c_attn.output[:] = 1
            inner = attention.source.attn_output_0.output[0].save()
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


# --- several inputs, several passes ------------------------------------------------------------------


def scenario_several_invokes(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(remote=remote) as tracer:
            with tracer.invoke(PROMPT):
                first = model.transformer.h[1].output[:, -1].save()
            with tracer.invoke(OTHER):
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


def scenario_generate_with_iteration(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=4, do_sample=False, remote=remote) as tracer:
            steps = [].save()
            for step in tracer.iter[:4]:
                steps.append((step, model.lm_head.output[:, -1].argmax(-1)))
            tokens = tracer.result.save()
        return [steps, tokens]

    steps, tokens = context.same(block)
    assert len(steps) == 4
    assert tokens.shape[0] == 1


def scenario_generate_edits_one_step(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.generate(PROMPT, max_new_tokens=3, do_sample=False, remote=remote) as tracer:
            for _ in tracer.iter[1]:
                model.transformer.h[2].output[:] = 0
            tokens = tracer.result.save()
        return tokens

    context.same(block)


def scenario_session_of_traces(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.session(remote=remote):
            with model.trace(PROMPT):
                hidden = model.transformer.h[0].output[:, -1]
            with model.trace(OTHER):
                model.transformer.h[0].output[:, -1] = hidden
                patched = model.lm_head.output[:, -1].save()
            nnsight.save(hidden)
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

    context.same(block)


# --- gradients, caches, edits -------------------------------------------------------------------------


def scenario_gradients(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[1].output
            hidden.requires_grad_(True)
            loss = model.lm_head.output[0, -1].sum()
            with loss.backward():
                gradient = hidden.grad.save()
        return gradient

    gradient = context.same(block)
    assert gradient.abs().sum() > 0


def scenario_weights_keep_no_gradient(context: Context) -> None:
    with context.remote.trace(PROMPT, remote=True):
        loss = context.remote.lm_head.output.sum()
        loss.backward()
        has = (context.remote.lm_head.weight.grad is not None).save()
    with context.remote.trace(PROMPT, remote=True):
        kept = (context.remote.lm_head.weight.grad is not None).save()
    assert has
    assert not kept


def scenario_cache(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote) as tracer:
            cache = tracer.cache(modules=[model.transformer.h[0], model.transformer.h[2].mlp])
        return {
            path: cache[path].output
            for path in ("model.transformer.h.0", "model.transformer.h.2.mlp")
        }

    context.same(block)


def scenario_edit_that_lasts(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.edit() as (_, edited):
            model.transformer.h[1].mlp.output[:] = 0
        with edited.trace(PROMPT, remote=remote):
            with_edit = edited.lm_head.output.save()
        with model.trace(PROMPT, remote=remote):
            without = model.lm_head.output.save()
        return [with_edit, without]

    with_edit, without = context.same(block)
    assert not torch.equal(with_edit, without)


def scenario_attention_weights_need_eager(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, output_attentions=True, remote=remote):
            attention = model.transformer.h[0].attn.output[1].save()
        return attention

    kwargs = {"task": "text-generation", "attn_implementation": "eager"}
    remote = block(TransformersModel(context.name, **kwargs), True)
    local = block(TransformersModel(context.folder, dispatch=True, **kwargs), False)
    assert_equal(remote, local)
    # The next request does not inherit the attention.
    scenario_reads_of_layers_and_logits(context)


def scenario_an_adapter_is_applied_to_its_request_alone(context: Context) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(context.folder)
    # An untrained adapter is the identity.
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            logits = model.lm_head.output.save()
        return logits

    with tempfile.TemporaryDirectory() as adapter:
        peft.get_peft_model(base, config).save_pretrained(adapter)
        kwargs = {"task": "text-generation", "peft": adapter}
        adapted = block(TransformersModel(context.name, **kwargs), True)
        local = block(TransformersModel(context.folder, dispatch=True, **kwargs), False)
    assert_equal(adapted, local)
    plain = context.same(block)
    assert not torch.equal(adapted, plain)


def adapted_from_a_hub(context: Context) -> None:
    """Run an adapter from a hub that the client reaches."""

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            logits = model.lm_head.output.save()
        return logits

    kwargs = {"task": "text-generation", "peft": "test-org/tiny-adapter"}
    adapted = block(TransformersModel(context.name, **kwargs), True)
    local = block(TransformersModel(context.folder, dispatch=True, **kwargs), False)
    assert_equal(adapted, local)
    plain = context.same(block)
    assert not torch.equal(adapted, plain)


def adapters_that_untrusted_users_may_not_name(context: Context) -> None:
    def asked(name: str) -> str:
        backend = RemoteBackend(context.remote.to_model_key(), env={"peft": name})

        def run() -> None:
            with context.remote.trace(PROMPT, backend=backend):
                context.remote.lm_head.output.save()

        return error_of(run)

    for folder in ("/tmp", "../..", "a/b/c", ".", "x" * 500, "org/na me"):
        assert "takes adapters from the Hub alone" in asked(folder), folder
    missing = asked("nobody/nothing")
    assert "'nobody/nothing' cannot be used here: there is no public repository" in missing, missing
    assert "it has no adapter_config.json" in asked(context.name)
    scenario_reads_of_layers_and_logits(context)


def scenario_an_adapter_that_does_not_exist(context: Context) -> None:
    backend = RemoteBackend(context.remote.to_model_key(), env={"peft": "nobody/nothing"})

    def run() -> None:
        with context.remote.trace(PROMPT, backend=backend):
            context.remote.lm_head.output.save()

    message = error_of(run)
    assert "could not be prepared as the request asks" in message, message
    assert "nobody/nothing" in message
    scenario_reads_of_layers_and_logits(context)


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


class Base(torch.nn.Module):
    """A class of the user's script."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value times the factor."""
        return value * self.factor


class Shifted(Base):
    """A class that refers to its base by `super()`, and to itself."""

    def __init__(self, factor: float, shift: float) -> None:
        super().__init__(factor)
        self.shift = shift
        assert __class__.__name__ == "Shifted"

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return the value times the factor, shifted."""
        return super().forward(value) + self.shift


def scenario_a_class_of_the_script_that_calls_super(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output
            shifted = Shifted(2.0, 1.0)(hidden).save()
            plain = Base(3.0)(hidden).save()
        return [shifted, plain]

    context.same(block)


def scenario_functions_travel_by_value(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        halved = lambda value: value / 2  # noqa: E731
        with model.trace(PROMPT, remote=remote):
            hidden = doubled(halved(model.transformer.h[0].output)).save()
        return hidden

    context.same(block)


class Point(NamedTuple):
    """Fields with a default and a method."""

    layer: int
    scale: float = 2.0

    def total(self) -> float:
        return self.layer * self.scale


Pair = collections.namedtuple("Pair", ["one", "other"])


def scenario_named_tuples_of_the_script(context: Context) -> None:
    point, pair = Point(2), Pair(1, other=[2])

    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[point.layer].output * point.total()
            found = nnsight.save([hidden, point._replace(scale=1.0).total(), list(pair._asdict())])
            made = nnsight.save([list(Point(3)), Pair(3, 4).other, Point._fields])
        return [found, made]

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


def scenario_a_users_object_comes_back_as_its_own_class(context: Context) -> None:
    with context.remote.trace(PROMPT, remote=True):
        probe = Probe(context.remote.lm_head.output[0, -1]).save()
    assert isinstance(probe, Probe)
    assert 0 <= probe.top() < 500


def scenario_a_view_is_not_sent_with_its_storage(context: Context) -> None:
    backend = RemoteBackend(context.remote.to_model_key())
    sizes = []
    backend.finalize = lambda content: (
        sizes.append(len(content))
        or RemoteBackend.finalize(  # type: ignore[method-assign]
            backend, content
        )
    )
    prompt = PROMPT * 20
    with context.remote.trace(prompt, backend=backend):
        row = context.remote.lm_head.output[0, -1].save()
    assert sizes[0] < 8 * row.numel() * row.element_size()


# --- how a job is waited for --------------------------------------------------------------------------


def scenario_non_blocking(context: Context) -> None:
    model = context.remote
    with model.trace(PROMPT, remote=True, blocking=False) as tracer:
        hidden = model.transformer.h[1].output.save()
    backend = tracer.backend
    assert backend.job_id
    result = until(backend)
    with context.local.trace(PROMPT):
        hidden = context.local.transformer.h[1].output.save()
    assert_equal(result["hidden"], hidden)
    assert backend.meta["execution_time"] > 0
    again = RemoteBackend(model.to_model_key(), blocking=False, job_id=backend.job_id)
    assert_equal(again()["hidden"], hidden)
    unknown = RemoteBackend(
        model.to_model_key(), blocking=False, job_id="00000000-0000-4000-8000-000000000000"
    )
    assert "is known here" in str(raised(unknown, Exception))


def scenario_asynchronous(context: Context) -> None:
    model = context.remote

    async def send_one() -> Any:
        backend = AsyncRemoteBackend(model.to_model_key())
        with model.trace(PROMPT, backend=backend):
            hidden = model.transformer.h[1].output.save()
        return (await backend)["hidden"]

    async def several() -> Any:
        return await asyncio.gather(*(send_one() for _ in range(4)))

    results = asyncio.run(several())
    with context.local.trace(PROMPT):
        hidden = context.local.transformer.h[1].output.save()
    for result in results:
        assert_equal(result, hidden)


def scenario_statuses_in_order(context: Context) -> None:
    model = context.remote

    async def watch() -> list[Any]:
        backend = AsyncRemoteBackend(model.to_model_key())
        with model.trace(PROMPT, backend=backend):
            print("from the block")
            hidden = model.transformer.h[1].output.save()
        return [update async for update in backend]

    updates = asyncio.run(watch())
    statuses = [*dict.fromkeys(update.status.value for update in updates[:-1])]
    # The client of a young job is sent only its latest status, and before the job's output.
    before = [status for status in ("QUEUED", "DISPATCHED") if status in statuses]
    assert statuses == [*before, "RUNNING", "LOG", "COMPLETED"], statuses
    assert updates[-3].description == "from the block"
    assert "hidden" in updates[-1]
    meta = updates[-2].meta
    assert meta["execution_time"] > 0
    assert meta["peak_memory"] > 1 << 20


def scenario_a_large_result_is_fetched(context: Context) -> None:
    def block(model: Any, remote: bool) -> Any:
        with model.trace(PROMPT, remote=remote):
            hidden = model.transformer.h[0].output
            large = hidden.repeat(1, 20000, 1).save()
        return large

    large = context.same(block)
    assert large.numel() * large.element_size() > 16 << 20


def scenario_without_compression(context: Context) -> None:
    CONFIG.API.COMPRESS = False
    try:
        scenario_reads_of_layers_and_logits(context)
        scenario_a_large_result_is_fetched(context)
    finally:
        CONFIG.API.COMPRESS = True


# --- hints -------------------------------------------------------------------------------------------


def logged(run: Callable[[RemoteBackend], Any], context: Context) -> list[str]:
    """Return the LOG lines that a job's client gets."""
    lines: list[str] = []
    backend = RemoteBackend(context.remote.to_model_key())
    note = backend.note

    def noted(response: Any) -> bool:
        if response.status is Status.LOG:
            lines.append(response.description)
        return note(response)

    backend.note = noted
    run(backend)
    return lines


def scenario_a_list_outside_the_block_is_filled(context: Context) -> None:
    model = context.remote

    def run(backend: RemoteBackend) -> None:
        results, known, seen = [], {}, [0]
        with model.trace(PROMPT, backend=backend):
            results.append(model.lm_head.output)
            known["norm"] = float(results[0].detach().norm()) + seen[0]
        assert results == []

    filled = logged(run, context)
    assert any("filled 'results'" in line and "`results = [].save()`" in line for line in filled)
    assert any("`known = {}.save()`" in line for line in filled)
    assert len(filled) == 2, filled


def scenario_nothing_is_saved(context: Context) -> None:
    model = context.remote

    def run(backend: RemoteBackend) -> None:
        with model.trace(PROMPT, backend=backend):
            for layer in model.transformer.h:
                hidden = layer.output

    [line] = logged(run, context)
    assert "saved nothing" in line, line
    assert "(hidden)" in line
    assert "`hidden = hidden.save()`" in line

    def saves(backend: RemoteBackend) -> None:
        with model.trace(PROMPT, backend=backend):
            hidden = model.lm_head.output.save()

    assert logged(saves, context) == []


def scenario_a_loop_that_outruns_the_model_is_told_each_time(context: Context) -> None:
    """Python shows a library's warning once per process, and a process may serve many jobs."""
    model = context.remote

    def run(backend: RemoteBackend) -> None:
        with model.generate(PROMPT, max_new_tokens=2, backend=backend) as tracer:
            kept = nnsight.save([])
            for _ in tracer.iter[:4]:
                kept.append(model.lm_head.output[0, -1].argmax())
        assert len(kept) == 2

    first, *others = [logged(run, context) for _ in range(3)]
    assert any(line.startswith("UserWarning: ") for line in first), first
    assert others == [first, first]


# --- errors -------------------------------------------------------------------------------------------


def scenario_an_error_names_the_users_line(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output
            hidden @ torch.ones(3, 3)  # the user's mistake

    message = error_of(run)
    line = run.__code__.co_firstlineno + 3
    assert f'"{__file__}", line {line}, in run' in message, message
    assert "hidden @ torch.ones(3, 3)" in message
    assert "RuntimeError: " in message
    assert "ndif" not in message.replace(__file__, "")
    assert "site-packages" not in message


def scenario_an_error_in_the_model_names_the_users_lines(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output = torch.ones(2, 3)  # the user's mistake
            logits = model.lm_head.output.save()

    message = error_of(run)
    assert "RuntimeError: " in message, message
    line = run.__code__.co_firstlineno + 2
    assert f'"{__file__}", line {line}, in run' in message, message
    assert "model.transformer.h[0].output = torch.ones(2, 3)" in message
    assert f'"{__file__}", line {line + 1}, in run' in message, message
    assert "greenlet" not in message

    def ends() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[2].mlp.output = torch.ones(2, 3)

    assert "h[2].mlp.output = torch.ones(2, 3)" in error_of(ends)


def scenario_an_error_in_a_users_function(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            users_module.fails(model.transformer.h[0].output)

    message = error_of(run)
    assert "users_module.py" in message, message
    assert "raise KeyError" in message
    assert message.rstrip().endswith("KeyError: 'no such probe'"), message


def scenario_an_error_in_a_session(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.session(remote=True):
            with model.trace(PROMPT):
                model.transformer.h[0].output.save()
            with model.trace(PROMPT):
                {}["missing"]

    message = error_of(run)
    line = run.__code__.co_firstlineno + 5
    assert f"line {line}" in message, message
    assert "KeyError: 'missing'" in message


def scenario_an_edited_script_is_not_confused_with_the_last(context: Context) -> None:
    """Two sources with one file name and line, as in a script that is edited between runs."""
    import linecache

    from nnsight.tracing import globals as tracing_globals

    for factor in (2, 3):
        source = (
            "with model.session(remote=True):\n"
            "    with model.trace(PROMPT):\n"
            f"        hidden = (model.transformer.h[0].output * {factor}).save()\n"
        )
        tracing_globals.SOURCES.clear()
        tracing_globals.BLOCKS.clear()
        linecache.cache["script.py"] = (len(source), None, source.splitlines(True), "script.py")
        scope: dict[str, Any] = {"model": context.remote, "PROMPT": PROMPT}
        exec(compile(source, "script.py", "exec"), scope)
        with context.local.trace(PROMPT):
            expected = (context.local.transformer.h[0].output * factor).save()
        assert_equal(scope["hidden"], expected)


def scenario_a_block_that_exits(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            model.transformer.h[0].output.save()
            raise SystemExit(3)

    assert "SystemExit: 3" in error_of(run)


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
            import os

            model.transformer.h[0].output.save()
            os._exit(0)

    message = error_of(run)
    assert "exit code 0" in message, message
    scenario_reads_of_layers_and_logits(context)


def scenario_what_cannot_be_sent_is_said(context: Context) -> None:
    model = context.remote

    def run() -> None:
        with model.trace(PROMPT, remote=True):
            import threading

            lock = threading.Lock()
            model.transformer.h[0].output.save()
            nnsight.save(lock)

    message = error_of(run)
    assert "could not be sent" in message, message
    assert "Save tensors" in message


def scenario_a_module_the_server_lacks(context: Context) -> None:
    backend = RemoteBackend(context.remote.to_model_key())
    backend.model_key = backend.model_key.replace("tiny-gpt2", "other")

    def run() -> None:
        with context.remote.trace(PROMPT, backend=backend):
            context.remote.transformer.h[0].output.save()

    message = error_of(run)
    assert "serves 'test-org/tiny-gpt2', not 'test-org/other'" in message, message


def scenario_the_class_of_a_model(context: Context) -> None:
    key = context.remote.to_model_key()
    for kind in (LanguageModel, VisionLanguageModel):
        # An alias of TransformersModel names that class; only the task may differ.
        alias = kind(context.name, task="text-generation")
        assert alias.to_model_key() == key
    with alias.trace(PROMPT, remote=True):
        hidden = alias.transformer.h[0].output.save()

    class Mine(TransformersModel):
        pass

    def run(model: Any) -> torch.Tensor:
        with model.trace(PROMPT, remote=True):
            hidden = model.transformer.h[0].output.save()
        return hidden

    mine = Mine(context.name, task="text-generation")
    message = error_of(lambda: run(mine))
    assert "Mine'. Make 'test-org/tiny-gpt2' with one of them. If yours is a subclass" in message
    # With the method that the message names, the server accepts the class.
    Mine._remoteable_class = lambda self: TransformersModel
    assert_equal(run(mine), hidden)


# --- what clients ask about the server ------------------------------------------------------------------


def scenario_status_and_comparison(context: Context) -> None:
    status = nnsight.ndif.status()
    assert status.status.value == "UP"
    assert context.name in status
    assert status[context.name]["state"] == "RUNNING"
    assert context.name in str(status)
    assert nnsight.ndif.ndif_status().status.value == "UP"
    assert nnsight.ndif.is_model_running(context.name)
    assert nnsight.ndif.is_model_running(context.name, task="text-generation")
    assert not nnsight.ndif.is_model_running(context.name, revision="another")
    comparison = nnsight.ndif.compare()
    assert comparison.python_matches
    assert comparison.packages["torch"]["match"]
    assert comparison.packages["nnsight"]["critical"]
    assert comparison.mismatches == {}
    # Packages that only the server needs are not compared.
    assert "accelerate" in comparison.packages
    assert "starlette" not in comparison.packages
    assert "torch" in str(comparison)
    me = nnsight.ndif.whoami()
    assert me in [{"email": None, "tags": rights} for rights in ([], ["trusted"])], me
