"""Harmless blocks give the same results with guards and without."""

# ruff: noqa: E501 - one case per line

from __future__ import annotations

import ast
import sys
import textwrap

import pytest
import torch

from tests.sandbox.protector.running import FILE, guarded, protector, unguarded

SNIPPETS = {
    "arithmetic": "result = [1 + 2 * 3 ** 2 // 4 % 5, -1, ~3, 7 / 2, 1 << 3, True and not False]",
    "names with underscores": "_x = 1\n__y = 2\n_ = 3\nresult = _x + __y + _",
    "class": """
        class Probe:
            kind = "probe"
            def __init__(self, width, *, scale=2):
                self._width = width
                self.__secret = 5
                self.scale = scale
            def __call__(self, x):
                return x * self.scale + self._width + self.__secret
            def __repr__(self):
                return f"{self.__class__.__name__}({self._width!r})"
            def __enter__(self):
                return self
            def __exit__(self, *error):
                self._width = 0
            def __len__(self):
                return 3
            def __getitem__(self, index):
                return index
            def __eq__(self, other):
                return self._width == other._width
            __hash__ = None
            @property
            def width(self):
                return self._width
            @width.setter
            def width(self, value):
                self._width = value
            @classmethod
            def make(cls):
                return cls(7)
            @staticmethod
            def helper():
                return "static"
        probe = Probe(1)
        with probe as same:
            inside = same._width
        probe.width = 9
        del probe.scale
        probe.scale = 1
        result = [probe(2), repr(probe), len(probe), probe[4], probe == Probe(9), Probe.make().width,
                  Probe.helper(), inside, Probe.kind, probe.__dict__, vars(probe), Probe.__name__]
    """,
    "inheritance": """
        class Base:
            registry = []
            def __init_subclass__(cls, /, tag=None, **options):
                super().__init_subclass__(**options)
                cls._tag = tag
                Base.registry.append(cls.__name__)
            def __init__(self, a):
                self._a = a
            def hello(self):
                return f"base {self._a}"
        class Child(Base, tag="x"):
            def __init__(self):
                super().__init__(4)
                super(Child, self).__setattr__("_b", 5)
            def hello(self):
                return super().hello() + str(self._b) + self._tag
        result = [Child().hello(), Base.registry, isinstance(Child(), Base), issubclass(Child, Base)]
    """,
    "metaclass": """
        class Meta(type):
            def __new__(mcs, name, bases, namespace):
                made = super().__new__(mcs, name, bases, namespace)
                made.tag = name.lower()
                return made
        class Tagged(metaclass=Meta):
            pass
        result = [Tagged.tag, type(Tagged).__name__, isinstance(Tagged, type)]
    """,
    "descriptor": """
        class Field:
            def __set_name__(self, owner, name):
                self._name = "_" + name
            def __get__(self, instance, owner=None):
                return getattr(instance, self._name, None)
            def __set__(self, instance, value):
                setattr(instance, self._name, value * 2)
        class Point:
            x = Field()
        point = Point()
        point.x = 4
        result = [point.x, hasattr(point, "_x"), getattr(point, "y", "none")]
    """,
    "fallback attributes": """
        class Loose:
            def __getattr__(self, name):
                if name.startswith("a"):
                    return name
                raise AttributeError(name)
            def __setattr__(self, name, value):
                object.__setattr__(self, name, value)
        loose = Loose()
        loose.z = 3
        result = [loose.abc, hasattr(loose, "b"), loose.z]
    """,
    "type": """
        Made = type("Made", (), {"x": 1, "double": lambda self: self.x * 2})
        result = [Made().double(), type(1) is int, type(int) is type, isinstance(int, type),
                  type("").__name__, issubclass(type, object), type(Made()) is Made]
    """,
    "dataclass": """
        from dataclasses import dataclass, field, replace, asdict, fields
        @dataclass(order=True)
        class Point:
            x: int
            y: "float" = 2.0
            tags: list = field(default_factory=list)
            def norm(self):
                return self.x * self.y
        @dataclass(frozen=True)
        class Fixed:
            a: int = 1
        one = Point(1)
        one.tags.append("t")
        try:
            Fixed().a = 2
            frozen = False
        except Exception as error:
            frozen = type(error).__name__
        result = [one.norm(), repr(one), one < Point(3), asdict(replace(one, x=5)), frozen,
                  [each.name for each in fields(Point)]]
    """,
    "named tuples and enumerations": """
        from collections import namedtuple, Counter, OrderedDict, defaultdict, deque
        from enum import Enum, IntFlag, auto
        from typing import NamedTuple
        Pair = namedtuple("Pair", "a b")
        class Triple(NamedTuple):
            a: int
            b: int = 2
        class Colour(Enum):
            RED = auto()
            BLUE = "blue"
            @property
            def shout(self):
                return self.name + str(self.value)
        counts = Counter("abracadabra")
        groups = defaultdict(list)
        groups["k"].append(1)
        result = [Pair(1, 2)._replace(a=9)._asdict(), Triple(1)._fields, Colour.RED.shout,
                  [each.name for each in Colour], Colour("blue") is Colour.BLUE, counts.most_common(2),
                  dict(groups), list(deque([1, 2, 3], maxlen=2)), len(Colour.__members__)]
    """,
    "generators": """
        def numbers(n):
            for i in range(n):
                got = yield i
                if got:
                    yield got * 100
        def chained():
            yield from numbers(2)
            return "done"
        g = numbers(3)
        result = [list(chained()), next(g), g.send(5), next(g), sum(i * i for i in range(4)),
                  {i: j for i, j in zip("ab", [1, 2])}, {i % 2 for i in range(5)}, [*range(3)]]
    """,
    "async": """
        class Step:
            def __await__(self):
                yield
                return 4
        class Manager:
            async def __aenter__(self):
                return 1
            async def __aexit__(self, *error):
                return False
        async def ticks():
            for i in range(3):
                yield i
        async def main():
            async with Manager() as one:
                found = [i async for i in ticks()]
                async for i in ticks():
                    found.append(i)
            return [one, found, await Step()]
        run = main()
        result = None
        while result is None:
            try:
                run.send(None)
            except StopIteration as stop:
                result = stop.value
    """,
    "scopes": """
        total = 0
        def counter():
            count = 0
            def step():
                nonlocal count
                global total
                count += 1
                total += 1
                return count
            return step
        step = counter()
        step()
        result = [step(), total, (lambda a, /, b=2, *c, d, **e: (a, b, c, d, e))(1, 3, 4, d=5, f=6)]
    """,
    "walrus and unpacking": """
        first, *rest = [1, 2, 3]
        (a, (b, *c)), d = (1, (2, 3, 4)), 5
        if (n := len(rest)) > 1:
            pass
        [x, y] = {**{"p": 1}, "q": 2}
        data = {"k": [1, 2]}
        data["k"][0], data["m"] = 7, 8
        del data["k"][1]
        result = [first, rest, a, b, c, d, n, x, y, data, [k := 3, k * 2]]
    """,
    "errors": """
        found = []
        class Mine(ValueError):
            def __init__(self, text, *, code):
                super().__init__(text)
                self.code = code
        try:
            try:
                raise Mine("bad", code=3)
            except Mine as error:
                found.append(error.code)
                raise KeyError("k") from error
        except (KeyError, TypeError) as error:
            found.append(type(error.__cause__).__name__)
            found.append(str(error))
        else:
            found.append("never")
        finally:
            found.append("finally")
        try:
            assert 1 == 2, "no"
        except AssertionError as error:
            found.append(error.args)
        result = found
    """,
    "match": """
        class Point:
            __match_args__ = ("x", "y")
            def __init__(self, x, y):
                self.x, self.y = x, y
        import enum
        class Level(enum.Enum):
            LOW = 1
            HIGH = 2
        def kind(value):
            match value:
                case 0 | 1:
                    return "bit"
                case [a, *rest] if a == 9:
                    return ("nine", rest)
                case {"k": v, **others}:
                    return (v, others)
                case Point(0, y=y):
                    return ("axis", y)
                case Point(x=x, y=[Point(1, b), *_]) as whole:
                    return (x, b, whole.x)
                case str(text) | bytes(text):
                    return ("text", text)
                case None | True:
                    return "constant"
                case Level.LOW | Level.HIGH as level:
                    return level.name
                case {Level.LOW: low}:
                    return low
                case Point():
                    return "point"
                case (1, 2):
                    return "pair"
                case int():
                    return "int"
                case _:
                    return "other"
        result = [kind(each) for each in (
            0, [9, 1, 2], {"k": 1, "m": 2}, Point(0, 4), Point(3, [Point(1, 5), 0]), "t", b"t", None,
            Point(7, 7), (1, 2), 77, 1.5, [Point(1, 2)], Level.HIGH, {Level.LOW: 3})]
    """,
    "match with names": """
        import enum
        class Level(enum.Enum):
            LOW = 1
            HIGH = 2
        match Level.HIGH:
            case Level.LOW:
                result = "low"
            case Level.HIGH:
                result = "high"
    """,
    "formatting": """
        value, width = 3.14159, 10
        class Thing:
            name = "thing"
            items = {"a": [1, 2]}
            def __format__(self, spec):
                return f"<{spec}>"
        result = [f"{value:>{width}.2f}|{value!r}|{Thing():abc}", "{:.1f} {0.name} {t.items[a]}".format
                  if False else "{0:.1f} {1.name} {t.items[a]}".format(value, Thing, t=Thing()),
                  "{} {}".format(1, "b"), "{x}".format_map({"x": 1}), "%s %d" % ("a", 2),
                  str.format("{:>4}", 1), f"{value=:.1f}"]
    """,
    "dynamic attributes": """
        import operator
        class Thing:
            pass
        thing = Thing()
        setattr(thing, "a", 1)
        thing.b = Thing()
        thing.b.c = 5
        delattr(thing, "a")
        result = [hasattr(thing, "a"), getattr(thing, "b").c, operator.attrgetter("b.c")(thing),
                  operator.attrgetter("b", "b.c")(thing)[1], operator.itemgetter(1)([4, 5]),
                  operator.itemgetter("a", "b")({"a": 1, "b": 2}), operator.getitem([1, 2], 0),
                  operator.methodcaller("upper")("x"), operator.add(1, 2), operator.iadd([1], [2])]
    """,
    "methods, aliases and cached properties": """
        import functools, typing
        class Thing:
            "A thing."
            def method(self):
                "A method."
                return 1
            method.note = "noted"
            @functools.cached_property
            def value(self):
                self.count = getattr(self, "count", 0) + 1
                return self.count
        thing, alias = Thing(), typing.List[Thing]
        result = [thing.method.note, thing.method.__name__, thing.method.__doc__, thing.method.__call__(),
                  thing.value, thing.value, list[int].__args__, typing.Annotated[Thing, 1].method.note,
                  dict[str, int].fromkeys("a"), alias.__origin__, [1].append.__name__]
    """,
    "functions": """
        import functools, itertools, contextlib, copy
        def logged(function):
            @functools.wraps(function)
            def inner(*arguments, **options):
                return ("logged", function(*arguments, **options))
            inner.calls = 1
            return inner
        @logged
        def add(a: int, b: "int" = 2) -> "int":
            "Adds."
            return a + b
        @functools.lru_cache
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        @contextlib.contextmanager
        def around():
            yield "in"
        with around() as inside:
            pass
        result = [add(1), add.__name__, add.__doc__, add.calls, fib(20), inside,
                  functools.reduce(lambda a, b: a * b, [1, 2, 3]), functools.partial(add, 5)(),
                  list(itertools.chain([1], [2])), copy.deepcopy({"a": [1]})]
    """,
    "text as code": """
        scope = {"a": 2}
        exec("b = a * 3\\nc = [i for i in range(b)]", scope)
        code = compile("a + b", "text", "eval")
        result = [scope["b"], scope["c"], eval(code, scope), eval("1 + 1")]
        exec("later = 5")
        result.append(later)
    """,
    "libraries": """
        import math, time, json, re, random, statistics, itertools, string, typing
        import collections.abc
        random.seed(0)
        result = [math.sqrt(2), json.loads(json.dumps({"a": [1, None]})), re.sub(r"(a)", r"<\\1>", "banana"),
                  random.random(), statistics.mean([1, 2]), string.ascii_lowercase[:3],
                  isinstance([], collections.abc.Sequence), time.time() > 0, typing.Optional[int] is not None]
    """,
    "tensors": """
        import torch
        import torch.nn.functional as F
        from torch import nn, optim
        torch.manual_seed(0)
        x = torch.arange(6.0).reshape(2, 3)
        same = x
        x += 1
        x[0] += 2
        x[:, 1] = 0
        x.T[0] *= 3
        w = torch.nn.Parameter(torch.ones(3))
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 2)
                self._calls = 0
                self.register_buffer("bias", torch.ones(2))
            def forward(self, x):
                self._calls += 1
                return F.relu(self.linear(x)) + self.bias
        net = Net().to(torch.float64).train()
        optimizer = optim.SGD(net.parameters(), lr=0.1)
        loss = net(x.double()).sum()
        loss.backward()
        optimizer.step()
        net.linear.weight.data[:] = 1
        net.linear.bias.requires_grad_(False)
        handle = net.register_forward_hook(lambda *a: None)
        handle.remove()
        with torch.no_grad():
            y = torch.einsum("ij,jk->ik", x, x.T)
        result = [x, same is x, y, net._calls, torch.linalg.norm(x), torch.softmax(x, -1), x.dtype, x.device,
                  x.numpy().tolist(), net.linear.weight.grad is not None, len(list(net.parameters())),
                  torch.cat([x, x]).shape, F.cosine_similarity(x[:1], x[1:]), w.grad]
    """,
    "arrays": """
        import numpy as np
        from numpy.linalg import norm
        a = np.arange(6).reshape(2, 3)
        a[a > 2] = 0
        a += 1
        rng = np.random.default_rng(0)
        result = [a.tolist(), float(norm(a)), np.mean(a), a.T.shape, rng.normal(size=2).tolist(),
                  np.fft.fft([1, 2]).tolist(), a.astype(np.float32).dtype.name]
    """,
    "redirection": """
        import contextlib
        class Text:
            def __init__(self):
                self.lines = []
            def write(self, text):
                self.lines.append(text)
        text = Text()
        with contextlib.redirect_stdout(text), contextlib.redirect_stdout(text):
            print("a line")
        result = text.lines
    """,
    "functions in containers": """
        import collections, math, torch
        by_name = {"sum": torch.sum, "sin": math.sin, "own": lambda x: x, "len": len, "print": print}
        by_name |= {"append": [1].append, "relu": torch.nn.functional.relu, "module": math}
        result = [by_name[each](torch.ones(2)).tolist() for each in ("sum", "relu", "own")]
        result += [by_name["sin"](0), by_name["len"]([1]), by_name["module"].pi, by_name["append"](2)]
        result += [collections.ChainMap(by_name)["sin"](0.5)]
    """,
    "private fields": """
        from dataclasses import dataclass, field, asdict
        @dataclass
        class Probe:
            layer: int
            _cache: dict = field(default_factory=dict)
        result = [repr(Probe(1)), Probe(1) == Probe(1), asdict(Probe(2, {"a": 1})), Probe(3)._cache]
    """,
    "sympy": """
        import sympy
        x = sympy.Symbol("x")
        result = [str(sympy.expand((x + 1) ** 2)), str(sympy.sympify("x**2 + 2*x").diff(x)),
                  str(sympy.simplify("sin(y)**2 + cos(y)**2"))]
        y, S = sympy.symbols("y S")
        result += [str(sympy.nsolve(sympy.cos(x) - x, x, 1)), str(sympy.latex(x / y, mul_symbol="dot")),
                   str(sympy.nsolve([x + S - 3, x - S], [x, S], [1, 1]).T), sympy.ccode(sympy.sqrt(x)),
                   str(sympy.groebner([x**2 - y, y**3 - x], x, y)), sympy.pretty(x + 1), sympy.srepr(x),
                   [str(each.evalf(5)) for each in sympy.Poly(x**5 - x + 1).all_roots()],
                   str(sympy.Sum(1 / x**2, (x, 1, sympy.oo)).evalf(8)), sympy.pycode(sympy.Max(x, y))]
        class Mine(sympy.Function):
            def _latex(self, printer):
                return "mine " + printer.doprint(self.args[0])
        result += [sympy.latex(Mine(x))]
    """,
    "annotations": """
        import torch
        def f(a: torch.Tensor, *b: "list[int]", **c: dict[str, "torch.Tensor"]) -> None:
            local: int = 3
            return local
        class Typed:
            field: "torch.Tensor | None" = None
            other: list[int]
        result = [f(1), Typed.field]
    """,
    "late imports": """
        def use():
            import math
            from collections import OrderedDict as O
            return math.pi, list(O(a=1))
        try:
            import os
        except ImportError:
            os = None
        if False:
            os.getcwd()
        result = use()
    """,
    "globals": "value = 1\nresult = [globals()['value'], 'value' in dir(), locals()['value']]",
}

if sys.version_info >= (3, 11):
    SNIPPETS["groups of errors"] = """
        found = []
        try:
            raise ExceptionGroup("several", [ValueError("v"), KeyError("k")])
        except* ValueError as group:
            found.append(len(group.exceptions))
        except* KeyError:
            found.append("key")
        result = found
    """


def equal(left: object, other: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(other, torch.Tensor):
        return left.dtype == other.dtype and torch.equal(left, other)
    if isinstance(left, list | tuple) and isinstance(other, list | tuple):
        return len(left) == len(other) and all(map(equal, left, other))
    return left == other


@pytest.mark.parametrize("name", SNIPPETS)
def test_harmless_code_gives_same_result_with_guards(name: str) -> None:
    source = textwrap.dedent(SNIPPETS[name])
    expected = unguarded(source)["result"]
    result = guarded(source)["result"]
    assert equal(result, expected), f"{result}\n{expected}"


def test_in_place_edit_keeps_tensor_identity() -> None:
    activation = torch.zeros(2, 3)
    address = activation.data_ptr()
    scope = guarded("x[0] += 1\nx.mul_(2)\nx += 1\ny = x[1]\ny[:] = 5", x=activation)
    assert scope["x"] is activation
    assert activation.data_ptr() == address
    assert activation.tolist() == [[3, 3, 3], [5, 5, 5]]


def test_compile_leaves_syntax_tree_unchanged() -> None:
    tree = ast.parse("import math\nx = math.pi\nx.y = 1")
    before = ast.dump(tree, include_attributes=True)
    protector().compile(tree, FILE)
    assert ast.dump(tree, include_attributes=True) == before


PRINTER = """
    import sympy
    from sympy.printing.str import StrPrinter
    class Mine(sympy.Function):
        def _own(self, printer):
            return "own of " + printer.doprint(self.args[0])
    class Printer(StrPrinter):
        printmethod = "_own"
    result = Printer().doprint(Mine(sympy.Symbol("x")))
"""


def test_sympy_printer_calls_users_printmethod() -> None:
    assert guarded(textwrap.dedent(PRINTER))["result"] == "own of x"
