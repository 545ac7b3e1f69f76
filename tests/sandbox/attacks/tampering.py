"""Attacks on state that the next request finds: weights, modules, settings, caches and threads.

An attack may succeed for its own request; the probe, a separate request, must see no effect.
"""

# These are attacks; the usual style rules do not apply.
# ruff: noqa: PTH109

from __future__ import annotations

from typing import Any

# Weights and the model


def answers(model: Any) -> object:
    """the model's outputs"""
    return model.lm_head.output[0, -1].double().sum().item()


def overwrites_weights(model: Any) -> object:
    """a parameter, in place"""
    model._module.transformer.h[1].mlp.c_fc.weight.data.zero_()
    return model.lm_head.output.sum()


def overwrites_weights_through_the_envoy(model: Any) -> object:
    """a parameter, in place and by its envoy"""
    import torch

    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.mul_(0)
    return model.lm_head.output.sum()


def overwrites_weights_through_numpy(model: Any) -> object:
    """a parameter, through the array that shares its memory"""
    model.transformer.h[1].mlp.c_fc.weight.detach().numpy()[:] = 0
    return model.lm_head.output.sum()


def replaces_a_parameter(model: Any) -> object:
    """a parameter, by another"""
    import torch

    layer = model._module.transformer.h[1].mlp.c_fc
    layer.weight = torch.nn.Parameter(torch.zeros_like(layer.weight))
    return model.lm_head.output.sum()


def replaces_a_module(model: Any) -> object:
    """a module, by another"""
    import torch

    model._module.transformer.h[1].mlp = torch.nn.Identity()
    return True


def adds_a_hook(model: Any) -> object:
    """a forward hook that stays"""
    norm = model._module.transformer.ln_f
    norm.register_forward_hook(lambda module, inputs, output: output * 0)
    return True


def adds_a_hook_to_everything() -> object:
    """a hook of all modules"""
    import torch

    torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    torch.nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: 1 / 0)
    return True


def sets_training(model: Any) -> object:
    """training mode, with dropout"""
    model._module.train()
    for module in model._module.modules():
        if type(module).__name__ == "Dropout":
            module.p = 0.9
    return True


def changes_the_configuration(model: Any) -> object:
    """the configuration: another attention"""
    model._module.config._attn_implementation = "no such thing"
    return True


def casts_the_model(model: Any) -> object:
    """another precision"""
    model._module.half()
    return True


# The tokenizer


def tokens(model: Any) -> object:
    """the tokens of a text"""
    return [model.tokenizer("The Eiffel Tower")["input_ids"], model.tokenizer.padding_side]


def changes_the_tokenizer(model: Any) -> object:
    """a new token"""
    model.tokenizer.add_tokens(["Eiffel"])
    return True


def changes_the_side_of_padding(model: Any) -> object:
    """an attribute of the tokenizer"""
    model.tokenizer.padding_side = "right" if model.tokenizer.padding_side == "left" else "left"
    return True


def stays_in_envoys(model: Any) -> object:
    """the state of the wrapper"""
    return [
        hasattr(model, "left"),
        hasattr(model.transformer, "left"),
        hasattr(model.config, "left"),
    ]


def leaves_attributes(model: Any) -> object:
    """attributes on the model, its parts and its configuration"""
    model._module.left = True
    model._module.transformer.left = True
    model._module.config.left = True
    return True


# torch's settings


def settings_of_torch() -> object:
    """the defaults of torch"""
    import torch

    return [
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.initial_seed() == 424242,
        repr(torch.tensor(1 / 3)),
        str(torch.zeros(1).device),
        torch.get_float32_matmul_precision(),
    ]


def sets_default_dtype() -> object:
    """torch.set_default_dtype"""
    import torch

    return torch.set_default_dtype(torch.float64)


def sets_default_device() -> object:
    """torch.set_default_device"""
    import torch

    return torch.set_default_device("meta")


def sets_the_seed() -> object:
    """torch.manual_seed"""
    import torch

    torch.manual_seed(424242)
    return True


def sets_threads() -> object:
    """torch.set_num_threads"""
    import torch

    torch.set_num_threads(3)
    return torch.get_num_threads()


def sets_determinism() -> object:
    """torch.use_deterministic_algorithms and similar settings"""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_printoptions(precision=1)
    return True


# Functions and modules


def functions_work(model: Any) -> object:
    """functions that every request calls"""
    import math

    import torch

    return [
        float(torch.ones(3).sum()),
        float(torch.nn.functional.relu(torch.tensor(-1.0))),
        math.sqrt(4),
        round(2.2),
        str(type(model.lm_head.output).__name__),
        float(torch.mean(torch.ones(2))),
    ]


def replaces_a_function_of_torch() -> object:
    """torch.mean and torch.ones"""
    import torch

    torch.mean = lambda *_, **__: torch.tensor(13.0)
    torch.ones = lambda *_, **__: torch.tensor([7.0])
    return True


def replaces_a_method_of_tensors() -> object:
    """Tensor.sum"""
    import torch

    torch.Tensor.sum = lambda *_, **__: torch.tensor(13.0)
    return True


def replaces_a_function_of_math() -> object:
    """math.sqrt"""
    import math

    math.sqrt = lambda *_: 13.0
    return True


def replaces_a_builtin() -> object:
    """builtins.round"""
    import builtins

    builtins.round = lambda *_: 13
    return True


def replaces_a_module_of_pythons() -> object:
    """sys.modules"""
    import sys
    import types

    sys.modules["math"] = types.SimpleNamespace(sqrt=lambda *_: 13.0)
    return True


def replaces_the_servers_pickler() -> object:
    """the function that serializes results"""
    import sys

    results = sys.modules["ndif.runtime.results"]
    results.Result._save = lambda self, file: file.write(b"forged")
    return True


def replaces_the_servers_generation() -> object:
    """the method that runs blocks"""
    import sys

    kind = sys.modules["ndif.runtime.generations.v08"].Nnsight08
    kind.run = lambda *_: {"returned": ["forged"]}
    return True


# The process


def state_of_the_process() -> object:
    """state of a process from one request to the next"""
    import gc
    import os
    import signal
    import sys
    import threading
    import warnings

    return [
        os.environ.get("LEFT"),
        os.getcwd(),
        os.umask(0o22) == 0o777,
        gc.isenabled(),
        sys.gettrace() is None,
        sys.getrecursionlimit(),
        [thread.name for thread in threading.enumerate() if thread.name == "left"],
        "left" in sys.modules,
        str(signal.getsignal(signal.SIGUSR1)),
        len([f for f in warnings.filters if f[2] is BytesWarning]),
        hasattr(threading, "left"),
        sys.getswitchinterval(),
    ]


def leaves_a_variable() -> object:
    """os.environ"""
    import os

    os.environ["LEFT"] = "here"
    return True


def leaves_a_folder() -> object:
    """os.chdir"""
    import os

    os.chdir("/usr")
    os.umask(0o777)
    return True


def leaves_a_module() -> object:
    """sys.modules"""
    import sys
    import types

    sys.modules["left"] = types.ModuleType("left")
    return True


def leaves_a_thread() -> object:
    """a thread that continues after the request"""
    import threading
    import time

    threading.Thread(target=time.sleep, args=(60,), name="left", daemon=True).start()
    return True


def leaves_a_trace() -> object:
    """sys.settrace and threading.settrace, which see every line of the next request"""
    import sys
    import threading

    sys.settrace(lambda *_: None)
    threading.settrace(lambda *_: None)
    return True


def leaves_a_signal() -> object:
    """a handler of a signal"""
    import signal

    signal.signal(signal.SIGUSR1, lambda *_: None)
    return True


def leaves_no_collector() -> object:
    """gc.disable, and an interpreter that never switches threads"""
    import gc
    import sys

    gc.disable()
    sys.setswitchinterval(100)
    sys.setrecursionlimit(150)
    return True


def leaves_a_filter() -> object:
    """warnings.simplefilter"""
    import warnings

    warnings.simplefilter("ignore", BytesWarning)
    return True


def replaces_nnsights_envoy() -> object:
    """nnsight's property that every block reads"""
    import nnsight.intervention.envoy

    nnsight.intervention.envoy.Envoy.output = 13
    return True
