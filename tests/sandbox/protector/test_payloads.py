"""Pickles that would run, reach or change objects are refused, with the name of the class."""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import heapq
import io
import math
import operator
import os
import pickle
import random
import statistics
import subprocess
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from ndif.sandbox.protector import Protector
from ndif.sandbox.protector.definitions import RefusedFunction
from ndif.sandbox.protector.placeholders import Placeholder
from ndif.sandbox.protector.unpickling import ForbiddenError


def load(content: bytes, persistent: dict[str, Any] | None = None) -> Any:
    protector = Protector()
    objects = protector.objects(persistent or {})
    return protector.unpickler({})(io.BytesIO(content), objects).load()


class Call:
    """An object that pickles as a call, with a state if one is given."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


GADGETS: dict[str, Any] = {
    "builtins.eval": Call(eval, ("1",)),
    "builtins.exec": Call(exec, ("1",)),
    "builtins.__import__": Call(__import__, ("os",)),
    "builtins.globals": Call(globals, ()),
    "nnsight.intervention.envoy.Envoy(...)": b"cnnsight.intervention.envoy\nEnvoy\n)R.",
    "nnsight.modeling.transformers.TransformersModel(...)": (
        b"(cnnsight.modeling.transformers\nTransformersModel\nVx\no."
    ),
    "nnsight.modeling.base.NNsight(...)": b"(Vx\ninnsight.modeling.base\nNNsight\n.",
    "extension codes": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", GADGETS)
def test_a_gadget_is_refused_by_name(name: str) -> None:
    content = GADGETS[name]
    if not isinstance(content, bytes):
        content = pickle.dumps(content)
    with pytest.raises(ForbiddenError) as caught:
        load(content)
    assert name in str(caught.value)


INERT: dict[str, Any] = {
    "posix.system": Call(os.system, ("true",)),
    "subprocess.Popen": Call(__import__("subprocess").Popen, ("true",)),
    "importlib.import_module": Call(__import__("importlib").import_module, ("os",)),
    "torch.serialization.load": Call(torch.load, ("x",)),
    "load": Call(np.load, ("x",)),
    "torch.storage._share_filename": b"ctorch.storage\n_share_filename\n.",
    "codecs.open": Call(__import__("codecs").open, ("x",)),
    "pickle.loads": Call(pickle.loads, (b"N.",)),
    "cloudpickle.cloudpickle.instance": Call(cloudpickle.cloudpickle.instance, (int,)),
    "shelve.Shelf": b"cshelve\nShelf\n.",
    "transformers": b"ctransformers.pipelines\npipeline\n.",
    "nnsight.util.from_import_path": b"cnnsight.util\nfrom_import_path\n.",
}


@pytest.mark.parametrize("name", INERT)
def test_unavailable_object_becomes_placeholder_with_its_name(name: str) -> None:
    """Nothing is called, and the first use raises an error with the reason."""
    content = INERT[name]
    if not isinstance(content, bytes):
        content = pickle.dumps(content)
    value = load(content)
    assert type(value) is Placeholder
    for use in (value, lambda: value.attribute, lambda: value + 1, lambda: [*value]):
        with pytest.raises(ImportError) as caught:
            use()
        assert name in str(caught.value)
        assert "is not available on this server" in str(caught.value)


def test_getattr_in_payload_reads_only_allowed_attributes() -> None:
    with pytest.raises(AttributeError, match=r"__subclasses__"):
        load(pickle.dumps(Call(getattr, (object, "__subclasses__"))))
    with pytest.raises(AttributeError, match=r"__class__"):
        load(pickle.dumps(Call(operator.attrgetter, ("__class__",))))(1)


class Pickler(pickle._Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return "Module:model" if isinstance(value, torch.nn.Linear) else None


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file, 4).dump(value)
    return file.getvalue()


def changed(state: Any) -> bytes:
    """Return a pickle that sets a state of the persistent module."""
    content = dumped((torch.nn.Linear(1, 1), state))
    assert content.endswith(b"\x86\x94.")
    return content.removesuffix(b"\x86\x94.") + b"b."


@pytest.mark.parametrize("state", [{"forward": 1}, (None, {"forward": 1})])
def test_payload_cannot_change_servers_objects(state: Any) -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ForbiddenError, match=r"cannot change an object of the class Linear"):
        load(changed(state), {"Module:model": module})
    assert "forward" not in vars(module)


class Sae(torch.nn.Module):
    note = "class"

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.Linear(2, 3)
        self.register_buffer("scale", torch.ones(1))
        self._hidden = {"a": 1}

    def forward(self, value: torch.Tensor) -> Any:
        return self.encoder(value) * self.scale


def test_sent_modules_keep_state_and_hooks() -> None:
    sae, calls = Sae(), []
    stack = torch.nn.Sequential(sae.encoder, torch.nn.ReLU(), torch.nn.MultiheadAttention(3, 1))
    sae.register_forward_hook(operator.methodcaller("__len__"))
    sae.eval()
    back, shared, inner = load(by_value(sae, stack, stack[0]))
    assert (type(back).note, back._hidden, back.training) == ("class", {"a": 1}, False)
    assert {*back.state_dict()} == {*sae.state_dict()}
    assert torch.equal(back.encoder.weight, sae.encoder.weight)
    assert isinstance(back.encoder.weight, torch.nn.Parameter)
    assert back.encoder is shared[0] is inner
    assert len(back._forward_hooks) == 1
    shared[0].register_forward_hook(lambda *_: calls.append(1))
    shared[:2](torch.ones(2))
    assert calls == [1]
    assert not sae.encoder._forward_hooks


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.nn.parallel.distributed", "DistributedDataParallel"),
        ("torch.nn.parallel.data_parallel", "DataParallel"),
        ("torch.jit._script", "RecursiveScriptModule"),
        ("torch.fx.graph_module", "GraphModule"),
        ("torch.ao.nn.quantized.modules.linear", "Linear"),
        ("torch.nn.utils.parametrize", "ParametrizationList"),
    ],
)
def test_module_classes_other_than_layers_are_not_made(module: str, name: str) -> None:
    """Other module classes are refused or become placeholders."""
    with pytest.raises(
        (ForbiddenError, ImportError), match=rf"{module}.*(cannot be sent|not available)"
    ):
        load(f"c{module}\n{name}\n)".encode() + b"\x81}b.")(torch.ones(1))


LINEAR = b"\x80\x04ctorch.nn.modules.linear\nLinear\n)\x81"


def test_module_accepts_only_one_plain_state() -> None:
    filled = pickle.dumps(torch.nn.Linear(1, 1), 4)
    with pytest.raises(ForbiddenError, match=r"cannot change an object of the class Linear"):
        load(filled[:-1] + b"}X\x07\x00\x00\x00forwardK\x01sb.")
    # A mapping that is not a dict, and a key that is not a string.
    for state in (b"ccollections\nCounter\n)R", b"}K\x01K\x01s", b"](K\x01K\x02\x86e"):
        with pytest.raises(ForbiddenError, match=r"must be a dictionary"):
            load(LINEAR + state + b"b.")
    # A call makes a module like a block does, and cannot be followed by a state.
    with pytest.raises(ForbiddenError, match=r"cannot change an object of the class Identity"):
        load(b"\x80\x04ctorch.nn.modules.linear\nIdentity\n)R}b.")
    with pytest.raises(
        ForbiddenError, match=r"cannot add items to an object of the class|cannot change"
    ):
        load(b"\x80\x04ctorch.nn.modules.container\nModuleList\n)\x81K\x01a.")


LAYERS = [value for value in vars(torch.nn).values() if isinstance(value, type)]
ARGUMENTS: list[tuple[Any, ...]] = [(), (2,), (2, 2), (2, 2, 2), (4, 2), ([4],), (torch.ones(2),)]


@pytest.mark.filterwarnings("ignore")
def test_torch_layers_can_be_sent() -> None:
    """Every class of `torch.nn` that takes only a few numbers, except the lazy classes."""
    unpickler, count = Protector().unpickler({}), 0
    for cls in LAYERS:
        if not issubclass(cls, torch.nn.Module) or cls.__name__.startswith(
            ("Lazy", "DataP", "Transformer")
        ):
            continue
        for arguments in ARGUMENTS:
            with contextlib.suppress(Exception):
                layer = cls(*arguments)
                break
        else:
            continue
        back = unpickler(io.BytesIO(pickle.dumps(layer, 4))).load()
        assert (type(back), str(back), {*vars(back)}) == (cls, str(layer), {*vars(layer)})
        count += 1
    assert count > 100


def load_mine(source: str, **names: Any) -> Any:
    """Load an instance of the class `Mine`, which `source` defines as a user's code."""
    protector = Protector()
    scope = {"__name__": "__main__", "torch": torch, **names}
    protector.execute(protector.compile(source, "script.py"), scope)
    content = b"\x80\x04cuser\nMine\n)\x81}X\x01\x00\x00\x00aK\x01sb."
    return protector.unpickler({("user", "Mine"): scope["Mine"]})(io.BytesIO(content)).load()


def test_new_method_of_users_module_is_not_called() -> None:
    """A `__new__` that returns the server's module has no effect."""
    served = torch.nn.Linear(2, 2)
    source = """
class Mine(torch.nn.Linear):
    def __new__(cls, *_):
        return served
"""
    back = load_mine(source, served=served)
    assert (type(back).__name__, back.a) == ("Mine", 1)
    assert not hasattr(served, "a")


def test_setstate_of_users_class_is_guarded() -> None:
    source = """
class Mine(torch.nn.Module):
    def __setstate__(self, state):
        self.__dict__.update(state)
        self.found = type(state).__mro__
"""
    assert load_mine(source.replace(".__mro__", ".__name__")).found == "dict"
    with pytest.raises(AttributeError, match=r"'__mro__' is not available"):
        load_mine(source)


def test_module_with_forbidden_base_is_refused() -> None:
    source = "class Mine(torch.nn.Sequential, base): pass"
    with pytest.raises(ForbiddenError, match=r"DataParallel cannot be sent"):
        load_mine(source, base=torch.nn.DataParallel)


def test_state_may_hold_servers_module_without_changing_it() -> None:
    served = torch.nn.Linear(2, 2)
    before = dict(vars(served))
    around = torch.nn.Sequential(torch.nn.Identity())
    around.register_forward_hook(operator.methodcaller("__len__"))
    around._modules["0"] = served
    back = load(dumped(around), {"Module:model": served})
    assert back[0] is served
    assert vars(served) == before
    assert not served._forward_hooks


@pytest.mark.parametrize("value", [torch.Tensor, math.sqrt, collections.OrderedDict])
def test_payload_cannot_change_classes_and_functions(value: Any) -> None:
    content = pickle.dumps((value, (None, {"x": 1})), 4).removesuffix(b"\x86\x94.") + b"b."
    with pytest.raises(ForbiddenError, match=r"cannot change an object"):
        load(content)


@pytest.mark.parametrize(
    ("setter", "arguments"),
    [
        (cloudpickle.cloudpickle._class_setstate, (torch.Tensor, ({"x": 1}, {}))),
        (cloudpickle.cloudpickle._function_setstate, (torch.load, ({}, {}))),
    ],
)
def test_state_setters_change_only_sent_objects(setter: Callable[..., Any], arguments: Any) -> None:
    with contextlib.suppress(ForbiddenError):
        assert type(load(cloudpickle.dumps(Call(setter, arguments)))) is Placeholder
    assert not hasattr(torch.Tensor, "x")
    assert torch.load.__name__ == "load"


def test_plain_values_are_loaded_unchanged() -> None:
    values = {
        "numbers": [
            1,
            2.5,
            1j,
            True,
            None,
            b"b",
            "t",
            (1,),
            {1},
            frozenset({2}),
            slice(1, 2),
            range(3),
        ],
        "mappings": [
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
            collections.deque([1]),
        ],
        "groups": collections.defaultdict(list, k=[1]),
        "space": types.SimpleNamespace(a=1),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "size": torch.Size([1, 2]),
        "function": torch.relu,
    }
    assert load(cloudpickle.dumps(values)) == values


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_and_arrays_are_loaded_unchanged(protocol: int) -> None:
    parameter = torch.nn.Parameter(torch.randn(2))
    values = [torch.randn(2, 3), torch.arange(3), torch.ones(2, dtype=torch.bfloat16), parameter]
    for value in values:
        back = load(pickle.dumps(value, protocol))
        assert torch.equal(back, value)
        assert type(back) is type(value)
    array = np.arange(6.0).reshape(2, 3)
    assert (load(pickle.dumps(array, protocol)) == array).all()
    assert load(pickle.dumps(np.float32(2.5), protocol)) == 2.5


def test_storage_with_call_is_refused() -> None:
    file = io.BytesIO()
    torch.save(Call(os.system, ("true",)), file)
    with pytest.raises(ForbiddenError, match=r"more than tensors"):
        load(pickle.dumps(Call(torch.storage._load_from_bytes, (file.getvalue(),))))


def test_module_in_payload_is_protected() -> None:
    module = load(cloudpickle.dumps(torch))
    assert module.ones(2).tolist() == [1, 1]
    with pytest.raises(AttributeError, match=r"torch.save is not available"):
        module.__getattr__("save")
    with pytest.raises(ImportError, match=r"module 'os' is not available"):
        load(cloudpickle.dumps(os)).getcwd()


def by_value(*values: Any) -> bytes:
    import sys

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(values)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@dataclasses.dataclass
class Point:
    x: int
    y: float = 2.0
    tags: list[str] = dataclasses.field(default_factory=list)


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


def test_dataclass_and_enumeration_can_be_sent() -> None:
    point, colour = load(by_value(Point(1, tags=["t"]), Colour.BLUE))
    assert repr(point).endswith("Point(x=1, y=2.0, tags=['t'])")
    assert type(point)(1, tags=["t"]) == point
    assert colour.value == "blue"
    assert [member.name for member in type(colour)] == ["RED", "BLUE"]


def test_bytecode_is_not_run() -> None:
    (function,) = load(by_value(equal))
    assert isinstance(function, RefusedFunction)
    with pytest.raises(TypeError, match=r"'equal' was sent as bytecode"):
        function(1, 1)


def equal(left: object, other: object) -> bool:
    return left == other


def test_a_class_with_a_reduction_is_refused() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (int, ())

    with pytest.raises(ForbiddenError, match=r"__reduce__"):
        load(cloudpickle.dumps(Odd))


def test_private_helper_in_payload_is_not_called() -> None:
    counted: dict[str, int] = {}
    loaded = load(pickle.dumps((Call(collections._count_elements, (counted, "a")), counted)))
    assert loaded[1] == {}
    with pytest.raises(ImportError, match=r"_count_elements"):
        loaded[0]()


def test_objects_derived_from_placeholders_are_placeholders() -> None:
    """A class, its instances with their state and items, and bound methods load without an error."""

    class Worker(threading.Thread):
        def __init__(self) -> None:
            self.items = [1]

    class Listed(list[int], subprocess.Popen): ...  # type: ignore[type-arg]

    listed = Listed.__new__(Listed)
    listed.extend([1, 2])
    values = {
        "class": Worker,
        "object": Worker(),
        "listed": listed,
        "way": Worker().is_alive,
    }
    loaded = load(cloudpickle.dumps([values, 1]))
    assert loaded[1] == 1
    for name, value in loaded[0].items():
        assert type(value) is Placeholder, name
        with pytest.raises(ImportError, match=r"holds an object of (threading.Thread|subprocess)"):
            value.items.append(2)


def test_placeholder_gives_no_access_to_its_object() -> None:
    loaded = load(cloudpickle.dumps([os, subprocess.run]))
    for value in loaded:
        assert copy.copy(value) is copy.deepcopy(value) is value
        with pytest.raises(AttributeError):
            value.__loader__  # noqa: B018
        with pytest.raises(ImportError):
            value.name = 1
    with pytest.raises(ImportError, match=r"subprocess.run is not available"):
        isinstance(1, loaded[1])
    with pytest.raises(ImportError, match=r"subprocess.run is not available"):
        type("Mine", types.resolve_bases((loaded[1],)), {})
    # An annotation does not count as a use, and the client gets the original objects back.
    assert (loaded[1] | None) is loaded[1]
    assert pickle.loads(pickle.dumps(loaded)) == [os, subprocess.run]


def test_functions_of_compiled_modules_are_loaded() -> None:
    values = [functools.reduce, heapq.heappush, bisect.bisect, random.Random(1), statistics.mean]
    loaded = load(pickle.dumps(values))
    assert loaded[:3] == values[:3]
    assert loaded[3].random() == random.Random(1).random()
    assert load(pickle.dumps(random.choice))([7]) == 7
