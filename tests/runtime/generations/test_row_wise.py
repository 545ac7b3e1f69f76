"""Blocks that provably read and edit only their own rows, and blocks without that proof."""

from __future__ import annotations

import pytest

from ndif.runtime.generations.row_wise import Edits, ExpressionKind, row_wise_edits

MODULES = frozenset(["transformer", "h", "ln_f", "lm_head", "attn", "mlp", "0", "1"])
NAMES = {
    "model": ExpressionKind.PART,
    "torch": ExpressionKind.TORCH,
    "F": ExpressionKind.TORCH,
    "nnsight": ExpressionKind.NNSIGHT,
    "vector": ExpressionKind.OWN,
    "found": ExpressionKind.OWN,
    "sorted": ExpressionKind.OTHER,
    "reader": ExpressionKind.OTHER,
}


def edits(source: str) -> Edits | None:
    return row_wise_edits(source, NAMES, MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "hidden = model.transformer.h[0].output.save()",
        "hidden = nnsight.save(model.transformer.h[-1].attn.output[0])",
        "model.transformer.h[1].output[:, -1] = 0",
        "model.transformer.h[1].output[0][:, -1] += vector",
        "model.transformer.h[1].mlp.output += vector",
        "token = model.lm_head.output[:, -1].argmax(dim=-1).save()",
        "logits = model.lm_head(model.transformer.ln_f(model.transformer.h[0].output)).save()",
        "head = model.lm_head\nlogits = head(vector).save()",
        "norms = [layer.output.norm().item() for layer in model.transformer.h]\nnorms.save()",
        "norms = [].save()\nfor i, layer in enumerate(model.transformer.h):\n"
        "    if i % 2 == 0:\n        norms.append(float(layer.output.norm()) * 2)\n    else:\n        pass",
        "for layer, scale in zip(model.transformer.h, [1, 2]):\n    layer.output *= scale",
        "layers = model.transformer.h\nfound['n'] = len(layers)",
        "both = {f'layer {i}': model.transformer.h[i].output for i in range(2)}\nboth.save()",
        "p = torch.nn.functional.softmax(vector, dim=-1)\nq = F.log_softmax(vector, -1)\np.save()",
        "top = vector.topk(3)\nvalues, places = top.values, top.indices",
        "x = vector if vector.sum() > 0 else -vector",
        "for i in range(3):\n    if i == 1:\n        continue\n    break",
        "x = vector * 2\nx[0, 0] = True\nx.save()",
        "x = model.lm_head.output.clone()\nx[:, -1] = 0\nx += 1",
        "total = 0\nfor layer in model.transformer.h:\n    total += layer.output.sum().item()",
        "x = model.lm_head.output\nx = x + 1\nmodel.lm_head.output[:] = x",
        "y = vector\nx = [y]\nx += [y]\nx[0] = y",
    ],
)
def test_reads_edits_in_place_and_arithmetic_are_row_wise(source: str) -> None:
    assert edits(source) is Edits.IN_PLACE


@pytest.mark.parametrize(
    "source",
    [
        "model.transformer.h[1].output = model.transformer.h[1].output + 3 * vector",
        "model.transformer.h[1].mlp.input = vector.to(torch.float32)",
        "for layer in model.transformer.h:\n    layer.output = layer.output * 2",
        "x = model.lm_head.output\nx = x * 2\nmodel.lm_head.output = x\nx.save()",
    ],
)
def test_assignments_are_row_wise(source: str) -> None:
    assert edits(source) is Edits.ASSIGNED


@pytest.mark.parametrize(
    "source",
    [
        # The model continues with the assigned tensor.
        "h = model.lm_head.output * 2\nmodel.lm_head.output = h\nh[:, -1] = 0",
        "model.lm_head.output = vector\nmodel.lm_head.output[:, -1] = 0",
        "h = model.lm_head.output.save()\nmodel.lm_head.output += 1\nmodel.lm_head.output = vector",
        "model.lm_head.output = vector\nvector += 1",
        # The variable may alias a tensor of the model.
        "h = model.lm_head.output\nh[:, -1] = 0",
        "h = model.lm_head.output[0]\nh += 1",
        "h = model.lm_head.output.squeeze()\nh *= 2",
        "h = torch.squeeze(model.lm_head.output)\nh *= 2",
        "h = [model.lm_head.output]\nh[0][:] = 0",
        "h = [model.lm_head.output]\nh[0] += 1",
        "h = list(model.lm_head.output)\nh[0] += 1",
        "for h in [model.lm_head.output]:\n    h += 1",
        "h, i = model.lm_head.output\nh += 1",
        "h = vector if found else model.lm_head.output\nh += 1",
        "h = found or model.lm_head.output\nh += 1",
        "h = model.lm_head.output.save()\nh += 1",
        "x = 0\nfor i in range(2):\n    x += 1\n    x = model.lm_head.output",
        "y = 0\nx = 0\nfor i in range(3):\n    y += 1\n    y = x\n    x = model.lm_head.output",
        # These calls affect the pass, or write to a tensor.
        "x = model.lm_head(vector, hook=True)",
        "x = torch.cat([vector, vector], out=vector)",
        "x = F.relu(model.lm_head.output, inplace=True)",
        "x = model.lm_head(**found)",
        "x = torch.cat(**found)",
        "x = torch.cat([vector], *found)",
        # A function of the script that shadows a Python builtin.
        "x = sorted(vector)",
        "x = reader",
        "x = [reader]",
    ],
)
def test_aliased_writes_and_pass_effects_are_not_row_wise(source: str) -> None:
    assert edits(source) is None


@pytest.mark.parametrize(
    "source",
    [
        "print('seen by whom?')",
        "open('/tmp/x', 'w')",
        "import os",
        "from torch import nn",
        "unknown.append(1)",
        "while True:\n    pass",
        "try:\n    x = vector\nexcept Exception:\n    pass",
        "with open('x') as f:\n    pass",
        "def helper():\n    pass",
        "class Helper:\n    pass",
        "x = lambda: 1",
        "x = (y := vector)",
        "x: int = 1",
        "del found['n']",
        "assert vector.sum() > 0",
        "raise ValueError",
        "global vector",
        "exec('print(1)')",
        "x = getattr(model, 'lm_head')",
        "x = model.lm_head.weight",
        "model.lm_head.weight.data.zero_()",
        "model.lm_head.weight.grad",
        "model.lm_head = vector",
        "model.cpu()",
        "model.train()",
        "model.to('cuda')",
        "x = model.transformer.h[0].inputs",
        "x = model.transformer.h[0].source",
        "model.transformer.h[0].skip(vector)",
        "model.output.backward()",
        "x = model.transformer.h[0]._module",
        "x = [model.lm_head]",
        "x = (model, vector)",
        "x = str(model)",
        "x = f'{model}'",
        "x = list(model.transformer.h)",
        "x = vector\nx = model.lm_head",
        "len = vector",
        "print = vector\nprint('x')",
        "range = model.transformer.h\nx = range(3)",
        "vector.zero_()",
        "vector.copy_(vector)",
        "vector.register_hook(None)",
        "vector.share_memory_()",
        "x = vector.__class__",
        "x = vector.grad_fn",
        "x = torch.rand(3)",
        "torch.manual_seed(0)",
        "torch.set_num_threads(1)",
        "torch.save(vector, 'x')",
        "torch.load('x')",
        "torch.nn.init.zeros_(vector)",
        "x = torch.nn.Linear(3, 3)",
        "x = torch.cuda.memory_allocated()",
        "nnsight.CONFIG",
        "nnsight.session()",
        "tracer.stop()",
        "x = yield_",
        "[print(x) for x in found]",
        "x = [y for y in model.transformer.h]",
        "for name, part in model.transformer.h:\n    pass",
        "for x in found:\n    pass\nelse:\n    pass",
        "x = layer.output\nfor layer in model.transformer.h:\n    pass",
        "y = [x for x in found]\nz = x",
        "not python",
    ],
)
def test_unknown_syntax_and_calls_are_not_row_wise(source: str) -> None:
    assert edits(source) is None


def test_module_named_output_is_not_row_wise() -> None:
    assert row_wise_edits("x = model.output", NAMES, {*MODULES, "output"}) is None


def test_deeply_nested_source_is_not_row_wise() -> None:
    assert not edits("x = " + "(" * 5000 + "vector" + ")" * 5000)
    assert not edits("x = " + "-" * 100_000 + "1")
