"""A user's class or `super()` gives no more access to the server's objects than the objects themselves."""

# ruff: noqa: E501 - one case per line

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from tests.sandbox.protector.running import guarded, protector, refusal, unguarded

CLASS = "the attribute '__class__' is not available on this server"
FILES = "is not available on this server: it writes files"
CHANGES = "is not available on this server: it changes the model"
PRIVATE = "is private, and not available on this server"
_TEXT = "class S(str):\n @classmethod\n def c(c, *a): return super().format(*a)\n def f(s, *a): return super().format(*a)\n def m(s, a): return super().format_map(a)\n def g(s, n): return super().__getattribute__(n)\n"
_MODULE = "import torch\nclass L(torch.nn.Module): pass\n"
_FRAME = "import pandas\nclass D(pandas.DataFrame):\n def f(s): return super().to_csv\nd = D({'a': [1]})\n"
_SUPER = "class S(super): pass\n"

# A part of the error, and the source.
REFUSED = [
    # super() of the server's objects
    (FILES, "super(type(config), config).save_pretrained('x')"),
    (FILES, "getattr(super(type(config), config), 'save_pretrained')"),
    (FILES, "import operator\noperator.attrgetter('save_pretrained')(super(type(config), config))"),
    (FILES, f"{_SUPER}S(type(config), config).save_pretrained"),
    (CHANGES, "super(type(part), part).register_forward_hook(print)"),
    (PRIVATE, "super(type(part), part).__getattribute__('register_forward_hook')"),
    (PRIVATE, "super.__getattribute__(super(type(part), part), 'register_forward_hook')"),
    (PRIVATE, f"{_SUPER}S(type(part), part)._call_impl"),
    ("it is an address in memory", "import torch\nclass T(torch.Tensor): pass\nt = torch.ones(1).as_subclass(T)\nsuper(T, t).data_ptr()"),
    ("it is an address in memory", "import torch\nobject.__getattribute__(torch.ones(1), 'data_ptr')()"),
    ("it writes files", "import numpy\nclass A(numpy.ndarray): pass\nsuper(A, numpy.ones(1).view(A)).tofile('x')"),
    (FILES, f"{_FRAME}d.f()"),
    (FILES, f"{_FRAME}d.__getattribute__('to_csv')"),
    (FILES, f"{_FRAME}object.__getattribute__(d, 'to_csv')"),
    (FILES, "import pandas\nclass L:\n __class__ = property(lambda s: pandas.DataFrame)\nsuper(pandas.DataFrame, L()).to_csv"),
    # super() of strings
    (CLASS, f"{_TEXT}S('{{0.__class__}}').f(1)"),
    (CLASS, f"{_TEXT}S('{{a.__class__}}').m({{'a': 1}})"),
    (CLASS, f"{_TEXT}S.c('{{0.__class__}}', 1)"),
    (CLASS, f"{_TEXT}S.format('{{0.__class__}}', 1)"),
    ("not available", f"{_TEXT}S('').g('format')"),
    ("not available", "object.__getattribute__('', 'format')"),
    ("not available", f"{_TEXT}type.__getattribute__(S, 'format_map')"),
    # inherited attributes of a user's class
    (FILES, "class C(type(config)): pass\nC.save_pretrained(config, 'x')"),
    (FILES, "class C(type(config)): pass\nsuper(C, C).save_pretrained"),
    (FILES, "class C(type(config)): pass\nC().save_pretrained('x')"),
    (FILES, "type(config)().save_pretrained('x')"),
    (FILES, "import copy\ncopy.deepcopy(config).to_json_file('x')"),
    (PRIVATE, "class C(type(config)): pass\nC()._dict_from_json_file('x')"),
    (CHANGES, f"{_MODULE}L.register_forward_hook(part, print)"),
    (CHANGES, f"{_MODULE}super(L, L).register_forward_hook(part, print)"),
    (CHANGES, f"{_MODULE}type.__getattribute__(L, 'register_forward_hook')"),
    (CHANGES, f"{_MODULE}class M(L):\n register_forward_hook = 1\nsuper(M, M).register_forward_hook"),
    (PRIVATE, f"{_MODULE}L._apply(part, torch.zeros_like)"),
    (PRIVATE, f"{_MODULE}L.__setstate__(part, {{}})"),
    (PRIVATE, "import enum\nclass P(enum.Enum): a = 1\nP._convert_('x', 'ndif.sandbox.protector.guards', bool)"),
    (PRIVATE, "import enum\nclass M(enum.EnumMeta):\n def f(cls): return super()._convert_\nclass P(metaclass=M): pass\nP.f()"),
]  # fmt: skip


@pytest.fixture
def objects() -> Iterator[dict[str, Any]]:
    """Parts of a model, held as objects of the server."""
    held = {"config": GPT2Config(), "part": torch.nn.Sequential(torch.nn.Linear(1, 1))}
    protector().objects(held)
    yield held
    protector().objects({})


@pytest.mark.parametrize(("expected", "source"), REFUSED, ids=range(len(REFUSED)))
def test_inherited_forbidden_access_is_refused(
    expected: str, source: str, objects: dict[str, Any]
) -> None:
    text, _ = refusal(source, **objects)
    assert text.startswith("AttributeError: "), text
    assert expected in text, text


@pytest.mark.parametrize(
    "listed",
    [
        "super(torch.nn.Sequential, part).named_parameters()",
        "torch.nn.Module.named_parameters(part)",
        "torch.nn.Module.named_parameters(self=part)",
        "L.named_parameters(part)",
        "super(L, L).named_parameters(part)",
        "L.state_dict(part).items()",
    ],
)
def test_listed_weights_are_copies(listed: str, objects: dict[str, Any]) -> None:
    before = objects["part"][0].weight.item()
    scope = guarded(f"{_MODULE}w = dict({listed})['0.weight']\nw.data.fill_(7.0)", **objects)
    assert scope["w"].item() == 7
    assert objects["part"][0].weight.item() == before


HARMLESS = {
    "modules": """
        import torch
        class Scaled(torch.nn.Linear):
            def __init__(self, size):
                super().__init__(size, size)
                self.register_buffer("scale", torch.ones(1))
                super().register_buffer("more", torch.ones(1))
            def forward(self, x):
                return super().forward(x) * self.scale
            def train(self, mode=True):
                super().train(mode)
                return self
            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    if name == "missing":
                        return name
                    raise
            def _apply(self, fn, recurse=True):
                return super()._apply(fn)
            def named_parameters(self, *a, **o):
                return super().named_parameters(*a, **o)
            def extra_repr(self):
                return super().extra_repr() + "!"
            def _load_from_state_dict(self, *a, **o):
                super()._load_from_state_dict(*a, **o)
        net = Scaled(2)
        net.double().eval()
        net.load_state_dict(net.state_dict())
        handle = net.register_forward_hook(lambda *_: None)
        handle.remove()
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        made = Scaled.forward(net, torch.ones(1, 2).double())
        result = [made, net.training, net.missing, [n for n, _ in net.named_parameters()], repr(net),
                  [n for n, _ in torch.nn.Module.named_parameters(net)], len(net._parameters), Scaled.__name__]
    """,
    "texts": """
        class Loud(str):
            def upper(self):
                return super().upper() + "!"
            def format(self, *a, **o):
                return super().format(*a, **o) + "?"
            def wide(self, **o):
                return super().format_map(o)
        class Louder(Loud):
            def wide(self, **o):
                return super().wide(**o) + super().format(1)
        result = [Loud("a").upper(), Louder("{0.real}").format(1), Louder("x").wide(), Loud("{a}").wide(a=2),
                  Loud.upper(Loud("b")), str.upper("c"), Loud.join(",", "ab")]
    """,
    "mappings": """
        class Counts(dict):
            def __missing__(self, key):
                return 0
            def update(self, *a, **o):
                super().update(*a, **o)
                return self
            def get(self, key, default=None):
                return super().get(key, default)
            def __setitem__(self, key, value):
                super().__setitem__(key, value)
        counts = Counts().update(a=1)
        counts["b"] += 2
        result = [dict(counts), counts.get("c", 9), Counts.fromkeys("a"), super(Counts, counts).get("a")]
    """,
    "errors": """
        class Mine(ValueError):
            def __init__(self, text, code):
                super().__init__(text)
                self.code = code
            def __str__(self):
                return super().__str__() + str(self.code)
            def with_code(self):
                super().add_note("n") if hasattr(self, "add_note") else None
                return self
        try:
            raise Mine("a", 1).with_code()
        except ValueError as error:
            result = [str(error), error.args, error.code]
    """,
    "class methods": """
        class Base:
            _tag = "t"
            @classmethod
            def make(cls):
                return [cls.__name__, cls._tag]
            @classmethod
            def _hidden(cls):
                return cls._tag
        class Child(Base):
            @classmethod
            def make(cls):
                return super().make() + [super()._hidden(), super()._tag]
        result = [Child.make(), Child._hidden(), Child._tag, sorted(n for n in vars(Child) if n == "make")]
    """,
    "metaclasses": """
        class Meta(type):
            def __call__(cls, *a):
                return super().__call__(*a)
            def __getattribute__(cls, name):
                return super().__getattribute__(name)
            def _private(cls):
                return cls.__name__
        class Made(metaclass=Meta):
            a = 1
        result = [Made().a, Made.a, Made._private()]
    """,
    "enumerations": """
        import enum
        class Kind(enum.Enum):
            @staticmethod
            def _generate_next_value_(name, start, count, last):
                return name.lower()
            A = "a"
            B = enum.auto()
            @classmethod
            def _missing_(cls, value):
                return cls.A
            def __str__(self):
                return super().__str__() + "!"
        result = [Kind("x").value, str(Kind.B), list(Kind.__members__), Kind._member_names_, Kind["A"].name]
    """,
    "tables": """
        import pandas
        class Table(pandas.DataFrame):
            @property
            def _constructor(self):
                return Table
            def head(self, n=1):
                return super().head(n)
        result = [Table({"a": [1, 2]}).head().a.tolist(), Table.mean(Table({"a": [1, 2]})).tolist()]
    """,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_inheritance_gives_same_result_with_guards(name: str) -> None:
    source = textwrap.dedent(HARMLESS[name])
    assert repr(guarded(source)["result"]) == repr(unguarded(source)["result"])


def test_users_override_of_denied_method_is_called(objects: dict[str, Any]) -> None:
    source = "class C(type(config)):\n def save_pretrained(self, x): return x\nclass L(type(part)):\n def register_forward_hook(self): return 3\nr = L.register_forward_hook(part)"
    assert guarded(source, **objects)["r"] == 3
