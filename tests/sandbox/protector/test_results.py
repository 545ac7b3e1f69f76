"""Results of a block: the client gets the block's objects, without names of the server's modules."""

# ruff: noqa: E501 - one block per line

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import math
import operator
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

from ndif.runtime.results import Result, trusted
from tests.sandbox.protector.running import guarded, protector, unguarded

MB = 1 << 20

WAYS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[], Any]]] = {
    "sandboxed": (guarded, protector),
    "trusted": (unguarded, lambda: trusted),
}

BUILTINS = "getattr, setattr, delattr, hasattr, vars, eval, exec, compile, globals, locals, dir, print, len, super"
OPERATORS = "operator.attrgetter, operator.itemgetter, operator.methodcaller, operator.add"
TOOLS = "functools.wraps, functools.update_wrapper, functools.cached_property, functools.partial"

# A block that binds `x`, and a use of `x` by the client.
MADE = {
    "type": ("x = type", "x is type"),
    "builtins": (f"x = [{BUILTINS}]", f"x == [{BUILTINS}]"),
    "functions of operator": (f"import operator\nx = [{OPERATORS}]", f"x == [{OPERATORS}]"),
    "functions of functools": (f"import functools\nx = [{TOOLS}]", f"x == [{TOOLS}]"),
    "dataclass": ("import dataclasses\nx = dataclasses.dataclass", "x is dataclasses.dataclass"),
    "modules": (
        "import math, torch\nx = [math, torch, torch.relu]",
        "x == [math, torch, torch.relu]",
    ),
    "loggers": (
        "import logging\nx = [logging.getLogger('a'), logging.getLogger, logging.Logger, logging.Handler]",
        "x == [logging.getLogger('a'), logging.getLogger, logging.Logger, logging.Handler]",
    ),
    "an attrgetter": ("import operator\nx = operator.attrgetter('real', 'imag')", "x(2)"),
    "an itemgetter": ("import operator\nx = operator.itemgetter(0)", "x('ab')"),
    "a methodcaller": ("import operator\nx = operator.methodcaller('split', sep='-')", "x('a-b')"),
    "a lambda": ("x = lambda value: value.upper()[0]", "x('ab')"),
    "a closure": (
        "def outer(n):\n def inner(value): return value[n].upper()\n return inner\nx = outer(1)",
        "x('ab')",
    ),
    "a function": (
        "def half(value): return value.real / 2\ndef x(value): return half(value) + 1",
        "x(4)",
    ),
    "functions on one line": (
        "x = [lambda v: v.real, lambda v: v.imag]",
        "[each(2) for each in x]",
    ),
    "an object": (
        "class A:\n def f(self, y): return self.g(y).real\n def g(self, y): return y\nx = A()",
        "x.f(3)",
    ),
    "an object of a subclass": (
        "class A:\n def f(self): return 'a'.upper()\nclass B(A):\n def f(self): return super().f() + 'b'.upper()\nx = B()",
        "x.f()",
    ),
    "a class without a statement": (
        "x = type('X', (), {'f': lambda self: self.g().real, 'g': lambda self: 3})()",
        "x.f(), type(x).__name__, type(x).__module__",
    ),
    "a metaclass": (
        "class M(type):\n pass\nclass A(metaclass=M): pass\nx = A()",
        "type(type(x)).__name__",
    ),
    "a match": (
        "class A:\n def f(self, v):\n  match v:\n   case {'a': n}: return n.real\nx = A()",
        "x.f({'a': 2})",
    ),
    "a namedtuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'a b', defaults=[2])\nx = [P(1), P(3, 4)]",
        "x[0].a, x[0], x[1]._asdict(), type(x[0]) is type(x[1]), type(x[0])(5).b, type(x[0]).__name__",
    ),
    "a NamedTuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n a: int\n b: int = 2\n def total(self): return self.a + self.b\nx = P(1)",
        "x.total(), x._replace(a=3), x.a",
    ),
    "a NamedTuple without methods": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n a: int\n b: int = 2\nx = P(1)",
        "x, x._replace(a=3), x.a",
    ),
    "a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass D:\n a: int\n b: list = field(default_factory=list)\n def n(self): return self.a.real\nx = D(1)",
        "x.n(), x.b, x == type(x)(1), dataclasses.replace(x, a=2).a, dataclasses.fields(x)[0].default is dataclasses.MISSING",
    ),
    "an enumeration": (
        "import enum\nclass E(enum.Enum):\n A = 1\n def low(self): return self.name.lower()\nx = E.A",
        "x.low(), x.value, type(x)(1) is x",
    ),
    "a generic class": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass G(Generic[T]):\n def f(self): return [1][0].real\nx = G[int]()",
        "x.f()",
    ),
}

KNOWN = {
    "dataclasses": dataclasses,
    "functools": functools,
    "logging": logging,
    "math": math,
    "operator": operator,
    "torch": torch,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_objects_made_in_block_return_to_client(name: str, way: str) -> None:
    run, definitions = WAYS[way]
    source, use = MADE[name]
    expected = eval(f"[{use}]", {**KNOWN, "x": unguarded(source)["x"]})
    content = Result({"x": run(source)["x"]}, MB, MB, definitions()).content
    assert content is not None
    assert b"ndif" not in content
    # The client is another process without these classes.
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    back = torch.load(io.BytesIO(content), weights_only=False)["x"]
    assert repr(eval(f"[{use}]", {**KNOWN, "x": back})) == repr(expected)


OF_THE_SERVER = {
    "a refused function": "x = open",
    "a method of a logger": "import logging\nx = logging.getLogger('a').info",
    "a function that checks": "x = type(1).__getattribute__",
}


@pytest.mark.parametrize("name", OF_THE_SERVER)
def test_server_object_in_result_is_refused_on_server(name: str) -> None:
    value = guarded(OF_THE_SERVER[name])["x"]
    with pytest.raises(Exception, match="is a part of the server"):
        Result({"x": value}, MB, MB, protector())


def test_copied_attrgetter_stays_guarded() -> None:
    """A getter's reduction returns the unguarded getter, which is meant for the client."""
    source = "import copy, operator\ng = operator.attrgetter('__class__')\n{}(g)(1)"
    for copying in ("copy.copy", "copy.deepcopy", "copy.copy(copy.copy)"):
        with pytest.raises(AttributeError, match="'__class__' is not available"):
            guarded(source.format(copying))
