"""Plain data in a variable of the script: classes of the standard library's data modules and of libraries."""

# ruff: noqa: E501 - one case per line

from __future__ import annotations

import argparse
import array
import builtins
import collections
import copy
import datetime
import decimal
import enum
import fractions
import functools
import importlib
import io
import ipaddress
import itertools
import numbers
import operator
import pathlib
import pickle
import random
import re
import statistics
import string
import textwrap
import time
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from ndif.sandbox.protector.names import words
from ndif.sandbox.protector.placeholders import Placeholder
from ndif.sandbox.protector.whitelist import ForbiddenError, Whitelist
from tests.sandbox.protector.running import guarded, loaded, refusal

MODULES = words("""
    array argparse collections datetime decimal enum fractions functools io ipaddress itertools numbers
    operator pathlib random re statistics string struct textwrap time types uuid zoneinfo
""")
"""Modules whose classes are data or resemble data."""

Row = tuple[Callable[[], Any], str] | str
"""A sample with a use of `value` in a block, or the reason why objects of the class cannot be sent."""

UNPICKLED = "a client cannot pickle it"
TOOL = "it is a tool and holds no data: what it makes can be sent"
FILE = "it is a file, or the way to one"
CODE = "it is code, or describes code"

PATH = (
    "value.name, value.parent.parts, str(value / 'b'), value.suffix, value.with_name('c').parts[-1]"
)
ADDRESS = "str(value), value.version, value == value"
NUMBERS = [3, 1, 2]

TABLE: dict[str, Row] = {
    "argparse.Action": TOOL,
    "argparse.ArgumentDefaultsHelpFormatter": TOOL,
    "argparse.ArgumentParser": TOOL,
    "argparse.BooleanOptionalAction": TOOL,
    "argparse.FileType": FILE,
    "argparse.HelpFormatter": TOOL,
    "argparse.MetavarTypeHelpFormatter": TOOL,
    "argparse.Namespace": (lambda: argparse.Namespace(a=1, b=[2]), "value.a, value.b, 'a' in value"),
    "argparse.RawDescriptionHelpFormatter": TOOL,
    "argparse.RawTextHelpFormatter": TOOL,
    "array.array": (lambda: array.array("d", [1.5, 2.0]), "value.tolist(), value.typecode, sum(value)"),
    "collections.ChainMap": (lambda: collections.ChainMap({"a": 1}, {"b": 2}), "value['b'], len(value)"),
    "collections.Counter": (lambda: collections.Counter("aab"), "value.most_common(1), value['z']"),
    "collections.OrderedDict": (lambda: collections.OrderedDict(b=1, a=2), "list(value.items())"),
    "collections.UserDict": (lambda: collections.UserDict(a=1), "value['a'], value.data"),
    "collections.UserList": (lambda: collections.UserList([1, 2]), "value[1], value.data"),
    "collections.UserString": (lambda: collections.UserString("ab"), "value.upper().data"),
    "collections.defaultdict": (lambda: collections.defaultdict(list, a=[1]), "value['a'], value['z']"),
    "collections.deque": (lambda: collections.deque([1, 2], maxlen=3), "value.maxlen, list(value)"),
    "datetime.date": (lambda: datetime.date(2024, 2, 29), "value.isoformat(), value.weekday()"),
    "datetime.datetime": (
        lambda: datetime.datetime(2024, 2, 29, 1, 2, tzinfo=datetime.timezone.utc),
        "value.isoformat(), value.utcoffset().days",
    ),
    "datetime.time": (lambda: datetime.time(1, 2, fold=1), "value.minute, value.fold"),
    "datetime.timedelta": (lambda: datetime.timedelta(1, 2, 3), "value.total_seconds()"),
    "datetime.timezone": (lambda: datetime.timezone(datetime.timedelta(hours=2)), "value.tzname(None)"),
    "datetime.tzinfo": (lambda: datetime.tzinfo(), "value is not None"),
    "decimal.Context": (lambda: decimal.Context(prec=3), "value.prec, str(value.divide(1, 3))"),
    "decimal.Decimal": (lambda: decimal.Decimal("1.10"), "str(value), str(value * 2)"),
    "decimal.DecimalTuple": (lambda: decimal.Decimal("1.1").as_tuple(), "value.digits, value.exponent"),
    "enum.Enum": (lambda: enum.Enum, "value.__name__"),
    "enum.EnumCheck": (lambda: enum.UNIQUE, "value.name"),
    "enum.EnumDict": CODE,
    "enum.EnumMeta": (lambda: enum.EnumMeta, "value.__name__"),
    "enum.EnumType": (lambda: enum.EnumMeta, "value.__name__"),
    "enum.Flag": (lambda: enum.Flag, "value.__name__"),
    "enum.FlagBoundary": (lambda: enum.FlagBoundary.STRICT, "value.value"),
    "enum.IntEnum": (lambda: enum.IntEnum, "value.__name__"),
    "enum.IntFlag": (lambda: enum.IntFlag, "value.__name__"),
    "enum.ReprEnum": (lambda: enum.ReprEnum, "value.__name__"),
    "enum.StrEnum": (lambda: enum.StrEnum, "value.__name__"),
    "enum.auto": UNPICKLED,
    "enum.member": (lambda: enum.member(1), "value.value"),
    "enum.nonmember": (lambda: enum.nonmember(1), "value.value"),
    "enum.property": CODE,
    "enum.verify": CODE,
    "fractions.Fraction": (lambda: fractions.Fraction(1, 3), "value.numerator, str(value + 1)"),
    "functools.cached_property": CODE,
    "functools.partial": (lambda: functools.partial(int, base=2), "value('11'), value.keywords"),
    "functools.partialmethod": CODE,
    "functools.singledispatchmethod": CODE,
    "io.BufferedIOBase": FILE,
    "io.BufferedRWPair": FILE,
    "io.BufferedRandom": FILE,
    "io.BufferedReader": FILE,
    "io.BufferedWriter": FILE,
    "io.BytesIO": (lambda: io.BytesIO(b"ab"), "value.read(1), value.tell(), value.getvalue()"),
    "io.FileIO": FILE,
    "io.IOBase": FILE,
    "io.IncrementalNewlineDecoder": UNPICKLED,
    "io.RawIOBase": FILE,
    "io.StringIO": (lambda: io.StringIO("a\nb"), "value.readline(), value.write('c'), value.getvalue()"),
    "io.TextIOBase": FILE,
    "io.TextIOWrapper": FILE,
    "ipaddress.IPv4Address": (lambda: ipaddress.ip_address("10.0.0.1"), ADDRESS),
    "ipaddress.IPv4Interface": (lambda: ipaddress.ip_interface("10.0.0.1/8"), ADDRESS),
    "ipaddress.IPv4Network": (lambda: ipaddress.ip_network("10.0.0.0/8"), ADDRESS),
    "ipaddress.IPv6Address": (lambda: ipaddress.ip_address("::1"), ADDRESS),
    "ipaddress.IPv6Interface": (lambda: ipaddress.ip_interface("::1/8"), ADDRESS),
    "ipaddress.IPv6Network": (lambda: ipaddress.ip_network("::/8"), ADDRESS),
    **{
        f"itertools.{name}": (functools.partial(factory, *arguments), "[next(value), next(value)]")
        for name, factory, *arguments in [
            ("accumulate", itertools.accumulate, NUMBERS),
            ("chain", itertools.chain, NUMBERS),
            ("combinations", itertools.combinations, NUMBERS, 2),
            ("combinations_with_replacement", itertools.combinations_with_replacement, NUMBERS, 2),
            ("compress", itertools.compress, NUMBERS, NUMBERS),
            ("count", itertools.count, 4),
            ("cycle", itertools.cycle, NUMBERS),
            ("dropwhile", itertools.dropwhile, operator.not_, NUMBERS),
            ("filterfalse", itertools.filterfalse, operator.not_, NUMBERS),
            ("islice", itertools.islice, NUMBERS, 2),
            ("permutations", itertools.permutations, NUMBERS),
            ("product", itertools.product, NUMBERS),
            ("repeat", itertools.repeat, 1),
            ("starmap", itertools.starmap, pow, [(1, 2), (2, 2)]),
            ("takewhile", itertools.takewhile, abs, NUMBERS),
            ("zip_longest", itertools.zip_longest, NUMBERS, [1]),
        ]
    },
    "itertools.batched": UNPICKLED,
    "itertools.groupby": (lambda: itertools.groupby([1, 1, 2]), "[key for key, _ in value]"),
    "itertools.pairwise": UNPICKLED,
    **{
        f"numbers.{name}": (functools.partial(getattr, numbers, name), "value.__name__")
        for name in ("Complex", "Integral", "Number", "Rational", "Real")
    },
    "operator.attrgetter": (lambda: operator.attrgetter("real"), "value(2)"),
    "operator.itemgetter": (lambda: operator.itemgetter(0, 1), "value('ab')"),
    "operator.methodcaller": (lambda: operator.methodcaller("split", "-"), "value('a-b')"),
    "pathlib.Path": (lambda: pathlib.Path("/data/a.txt"), PATH),
    "pathlib.PosixPath": (lambda: pathlib.Path("data/a.txt"), PATH),
    "pathlib.PurePath": (lambda: pathlib.PurePath("/data/a.txt"), PATH),
    "pathlib.PurePosixPath": (lambda: pathlib.PurePosixPath("/data/a.txt"), PATH),
    "pathlib.PureWindowsPath": (lambda: pathlib.PureWindowsPath("c:/data/a.txt"), PATH + ", value.drive"),
    "pathlib.WindowsPath": UNPICKLED + ", except on Windows: see below",
    "random.Random": (lambda: random.Random(3), "value.random(), value.getrandbits(8)"),
    "random.SystemRandom": UNPICKLED,
    "re.Match": UNPICKLED,
    "re.Pattern": (lambda: re.compile("(?P<a>b+)", re.IGNORECASE), "value.findall('aBB'), value.groupindex['a']"),
    "re.RegexFlag": (lambda: re.IGNORECASE | re.MULTILINE, "int(value)"),
    "re.Scanner": UNPICKLED,
    "statistics.LinearRegression": (lambda: statistics.LinearRegression(1.0, 2.0), "value.slope"),
    "statistics.NormalDist": (lambda: statistics.NormalDist(1, 2), "value.mean, value.cdf(1)"),
    "string.Formatter": "it looks up attributes that a string names",
    "string.Template": (lambda: string.Template("$a"), "value.substitute(a=1)"),
    "struct.Struct": UNPICKLED,
    "textwrap.TextWrapper": (lambda: textwrap.TextWrapper(width=5), "value.wrap('a b c d')"),
    "time.struct_time": (lambda: time.gmtime(0), "value.tm_year, value[1]"),
    "types.AsyncGeneratorType": UNPICKLED,
    "types.BuiltinFunctionType": (lambda: len, "value([1])"),
    "types.BuiltinMethodType": (lambda: "a".upper, "value()"),
    "types.CapsuleType": UNPICKLED,
    "types.CellType": CODE,
    "types.ClassMethodDescriptorType": UNPICKLED,
    "types.CodeType": CODE,
    "types.CoroutineType": UNPICKLED,
    "types.DynamicClassAttribute": CODE,
    "types.EllipsisType": (lambda: ..., "value is ..."),
    "types.FrameType": UNPICKLED,
    "types.FunctionType": (lambda: statistics.mean, "value([1, 3])"),
    "types.GeneratorType": UNPICKLED,
    "types.GenericAlias": (lambda: list[int], "str(value)"),
    "types.GetSetDescriptorType": UNPICKLED,
    "types.LambdaType": CODE,
    "types.MappingProxyType": (lambda: types.MappingProxyType({"a": 1}), "value['a'], len(value)"),
    "types.MemberDescriptorType": UNPICKLED,
    "types.MethodDescriptorType": (lambda: str.upper, "value('a')"),
    "types.MethodType": (lambda: collections.Counter("aab").most_common, "value(1)"),
    "types.MethodWrapperType": (lambda: (1).__add__, "value(2)"),
    "types.ModuleType": (lambda: statistics, "value.mean([1, 3])"),
    "types.NoneType": (lambda: None, "value is None"),
    "types.NotImplementedType": (lambda: NotImplemented, "value is NotImplemented"),
    "types.SimpleNamespace": (lambda: types.SimpleNamespace(a=1), "value.a, str(value)"),
    "types.TracebackType": UNPICKLED,
    "types.UnionType": (lambda: int | str, "str(value), isinstance(1, value)"),
    "types.WrapperDescriptorType": (lambda: int.__add__, "value(1, 2)"),
    "uuid.SafeUUID": (lambda: uuid.SafeUUID.unknown, "value.name"),
    "uuid.UUID": (lambda: uuid.UUID(int=7), "value.hex, str(value), value.int"),
    "zoneinfo.ZoneInfo": (
        lambda: datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Paris")),
        "value.utcoffset().seconds, str(value.tzinfo)",
    ),
}  # fmt: skip
"""Each class: an accepted sample with its use, or the reason for its refusal."""


def classes_of(module: str) -> Iterator[tuple[str, type]]:
    """Yield the public classes that a module defines, once each, with their public names."""
    imported = importlib.import_module(module)
    classes: list[type] = []
    homes = (module, f"_{module}", f"{module}._local", *(["builtins"] if module == "types" else []))
    for name, value in vars(imported).items():
        if name.startswith("_") or not isinstance(value, type) or issubclass(value, BaseException):
            continue
        alias = name != value.__name__ and getattr(imported, value.__name__, None) is value
        if value.__module__ in homes and value not in classes and not alias:
            classes.append(value)
            yield f"{module}.{name}", value


CLASSES = dict(entry for module in sorted(MODULES) for entry in classes_of(module))
ACCEPTED = {
    name: row for name, row in TABLE.items() if name in CLASSES and not isinstance(row, str)
}


def test_table_lists_every_data_class() -> None:
    """A new Python version with a new data class fails this test before users notice."""
    assert {*CLASSES} - {*TABLE} == set()


def sent(value: Any) -> Any:
    """Return a sent value as a block receives it."""
    return loaded(cloudpickle.dumps(value, protocol=4))


def seen_in_a_block(value: Any, use: str) -> str:
    results = guarded(f"import torch\nfound = [{use}]", value=value)["found"]
    return str([*map(str, results)])


def seen_at_home(value: Any, use: str) -> str:
    return str([*map(str, eval(f"[{use}]", {"value": value, "torch": torch}))])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ACCEPTED)
def test_standard_library_data_is_accepted_and_usable(name: str) -> None:
    make, use = ACCEPTED[name]
    assert seen_in_a_block(sent(make()), use) == seen_at_home(make(), use)


REFUSED = [
    name for name, row in TABLE.items() if isinstance(row, str) and row not in (UNPICKLED, CODE)
]


@pytest.mark.parametrize("name", [name for name in REFUSED if name in CLASSES])
def test_refused_classes_give_no_access_to_files(name: str) -> None:
    """The class itself becomes a placeholder in a payload, or serves only as data."""
    try:
        value = sent(CLASSES[name])
    except ForbiddenError:
        return
    assert type(value) is Placeholder or not hasattr(value, "open"), value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(dir(builtins))))
def test_builtin_exceptions_can_be_sent(name: str) -> None:
    cls = getattr(builtins, name)
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        return
    given: Any = ("a",)
    if issubclass(cls, UnicodeError) and cls is not UnicodeError:
        given = ("utf-8", "é" if cls is UnicodeEncodeError else b"\xff", 0, 1, "why")
        given = ("é", 0, 1, "why") if cls is UnicodeTranslateError else given
    if cls.__name__ == "ExceptionGroup":
        given = ("several", [ValueError("a")])
    back = sent(cls(*given))
    assert type(back) is type(cls(*given))
    assert str(back.args) == str(cls(*given).args)


LIBRARIES: dict[str, tuple[Callable[[], Any], str]] = {
    "numpy.random.Generator": (lambda: np.random.default_rng(3), "value.random(), value.spawn(1)[0].random()"),
    "numpy.random.RandomState": (lambda: np.random.RandomState(3), "value.rand()"),
    "numpy.random.SeedSequence": (lambda: np.random.SeedSequence(3), "value.generate_state(2).tolist()"),
    **{
        f"numpy.random.{name}": (functools.partial(getattr(np.random, name), 3), "value.random_raw()")
        for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
    },
    "numpy.datetime64": (lambda: np.datetime64("2024-02-29"), "str(value)"),
    "numpy.dtype": (lambda: np.dtype([("a", int)]), "str(value)"),
    "numpy.ma.MaskedArray": (lambda: np.ma.array([1, 2], mask=[True, False]), "value.sum(), value.mask.tolist()"),
    "numpy.poly1d": (lambda: np.poly1d([1, 2]), "value(3)"),
    "torch.Generator": (lambda: torch.Generator().manual_seed(3), "value.initial_seed(), torch.rand(2, generator=value).tolist()"),
    "torch.Size": (lambda: torch.Size([1, 2]), "value.numel()"),
    "torch.device": (lambda: torch.device("meta"), "value.type"),
    "torch.dtype": (lambda: torch.bfloat16, "value.itemsize"),
    "torch.layout": (lambda: torch.sparse_coo, "str(value)"),
    "torch.memory_format": (lambda: torch.channels_last, "str(value)"),
    "torch.return_types": (lambda: torch.arange(4.0).topk(2), "value.values.tolist(), value.indices.tolist()"),
    "a meta tensor": (lambda: torch.empty(2, 3, device="meta"), "value.shape, value.device, value.dtype"),
    "a meta parameter": (lambda: torch.nn.Parameter(torch.empty(2, device="meta")), "value.shape, value.requires_grad"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "value.to_dense().tolist()"),
    "a compressed tensor": (lambda: torch.eye(2).to_sparse_csr(), "value.to_dense().tolist()"),
    "a quantized tensor": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "value.dequantize().tolist()"),
    "a conjugated tensor": (lambda: torch.tensor([1j]).conj(), "value.imag.tolist()"),
    "a buffer": (lambda: torch.nn.Buffer(torch.ones(2)), "value.tolist()"),
    "a bound method": (lambda: torch.ones(2).sum, "value().item()"),
    "a bound method of Python": (lambda: torch.ones(2).norm, "value().item()"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_data_is_accepted_and_usable(name: str) -> None:
    make, use = LIBRARIES[name]
    assert seen_in_a_block(sent(make()), use) == seen_at_home(make(), use)


DENIED = Whitelist.read(None).of_class(torch.Tensor)


@pytest.mark.filterwarnings("ignore")
def test_every_allowed_tensor_method_can_be_sent() -> None:
    methods = {
        name: value
        for name in dir(torch.Tensor)
        if not name.startswith("_") and callable(value := getattr(torch.Tensor, name))
        if name != "save"  # nnsight adds it
    }
    assert len(methods) > 500
    for name, method in methods.items():
        try:
            content = cloudpickle.dumps(method, protocol=4)
        except Exception:
            continue  # no client can send it
        try:
            back = loaded(content)
        except AttributeError as error:
            assert name in DENIED, (name, error)  # noqa: PT017 - the expectation depends on the name
        else:
            assert (type(back) is Placeholder) if name in DENIED else (back == method), name


USES = [
    "value.read_text()", "value.open()", "value.exists()", "value.unlink()", "value.iterdir()", "value.stat()",
    "value.resolve()", "value.touch()", "type(value).cwd()", "value.absolute()", "value.mkdir()", "value.expanduser()",
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_path_object_opens_no_file(use: str) -> None:
    text, _ = refusal(use, value=sent(pathlib.Path("/etc/hostname")))
    assert text.startswith("AttributeError: PosixPath."), text
    assert "is not available on this server: the path belongs to your machine" in text


def test_every_file_method_of_path_is_denied() -> None:
    """A new Python version with a new method fails this test before operators notice."""
    path = sent(pathlib.Path("a"))
    assert [
        name
        for name in dir(pathlib.Path)
        if hasattr(path, name) and not hasattr(pathlib.PurePath, name)
    ] == []
    assert "open" in dir(path)


def test_path_returns_to_client_with_original_class() -> None:
    given = pathlib.Path("/data/a.txt")
    values = sent([given, given.parent])
    back = pickle.loads(pickle.dumps([*values, values[0] / "b"]))
    assert back == [given, given.parent, given / "b"]
    assert {*map(type, back)} == {type(given)}
    # A copy within a block is still a path that cannot be opened.
    assert copy.copy(values[0]) is copy.deepcopy(values[0]) is values[0]


def test_windows_path_is_accepted() -> None:
    path = loaded(b"cpathlib\nWindowsPath\n(Vc:/data\nVa.txt\ntR.")
    assert (path.drive, path.name, type(path).__name__) == ("c:", "a.txt", "WindowsPath")


def test_in_memory_file_does_not_expose_other_classes() -> None:
    for source in (
        "type(value).__mro__",
        "value.__class__",
        "type(value).__bases__",
        "value.__reduce_ex__(4)",
    ):
        assert refusal(source, value=sent(io.StringIO("a")))[0].startswith("AttributeError"), source
