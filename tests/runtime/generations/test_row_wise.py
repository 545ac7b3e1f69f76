"""Blocks that read and edit their own rows, and those of which that cannot be said."""

from __future__ import annotations

import pytest

from ndif.runtime.generations.row_wise import Kind, is_row_wise

MODULES = frozenset(["transformer", "h", "ln_f", "lm_head", "attn", "mlp", "0", "1"])
NAMES = {
    "model": Kind.PART,
    "torch": Kind.TORCH,
    "F": Kind.TORCH,
    "nnsight": Kind.NNSIGHT,
    "vector": Kind.VALUE,
    "found": Kind.VALUE,
}


def holds(source: str) -> bool:
    return is_row_wise(source, NAMES, MODULES)


@pytest.mark.parametrize(
    "source",
    [
        "hidden = model.transformer.h[0].output.save()",
        "hidden = nnsight.save(model.transformer.h[-1].attn.output[0])",
        "model.transformer.h[1].output[:, -1] = 0",
        "model.transformer.h[1].output = model.transformer.h[1].output + 3 * vector",
        "model.transformer.h[1].mlp.output += vector",
        "model.transformer.h[1].mlp.input = vector.to(torch.float32)",
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
        "x = vector[..., 1:3]\nx[0, 0] = True\nx.save()",
    ],
)
def test_reads_edits_and_arithmetic_are_row_wise(source: str) -> None:
    assert holds(source)


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
def test_anything_else_is_not(source: str) -> None:
    assert not holds(source)


def test_a_module_that_is_called_output_could_be_either() -> None:
    assert not is_row_wise("x = model.output", NAMES, {*MODULES, "output"})


def test_nesting_without_end_is_refused() -> None:
    assert not holds("x = " + "(" * 5000 + "vector" + ")" * 5000)
    assert not holds("x = " + "-" * 100_000 + "1")
