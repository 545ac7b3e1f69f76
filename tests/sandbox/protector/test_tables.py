"""pandas and einops: every denied name is refused, and ordinary use is allowed."""

# ruff: noqa: E501 - one use per line

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import cloudpickle
import pandas
import pytest
import torch

from ndif.sandbox.protector import Protector
from ndif.sandbox.protector.whitelist import Whitelist
from tests.sandbox.protector.running import guarded, refusal

WHITELIST = Whitelist.read(None)


def denied(module: str) -> list[str]:
    """Return the denied dotted names below a module."""
    return list(WHITELIST.modules[module].denied)


def is_installed(path: str) -> bool:
    """Return True if this version of a library has a denied name."""
    above, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(above), name) or (
            importlib.util.find_spec(path) is not None
        )
    except ImportError:
        return False


@pytest.mark.parametrize("name", [f"{m}.{n}" for m in ("pandas", "einops") for n in denied(m)])
def test_a_denied_name_is_refused_with_its_reason(name: str) -> None:
    above, _, last = name.rpartition(".")
    reason = WHITELIST.modules[name.partition(".")[0]].reason(name)
    source = f"import {above} as module\nmodule.{last}"
    if not is_installed(name):
        assert "Error" in refusal(source)[0]
        return
    text, line = refusal(source)
    assert f"is not available on this server: {reason}" in text, text
    assert line == 2
    text, _ = refusal(f"from {above} import {last}\n{last}()")
    assert "is not available on this server" in text, text
    # The denied name as a module, if it is one.
    text, _ = refusal(f"import {name} as module\nmodule()")
    assert "is not available on this server" in text or "No module named" in text, text


OBJECTS = [
    (kind, name)
    for kind in ("DataFrame", "Series", "Index")
    for name in WHITELIST.of_class(getattr(pandas, kind))
    if hasattr(getattr(pandas, kind), name)
]


@pytest.mark.parametrize(("kind", "name"), OBJECTS)
def test_a_denied_method_is_refused_with_its_reason(kind: str, name: str) -> None:
    reason = WHITELIST.of_class(getattr(pandas, kind))[name]
    expected = f"AttributeError: {kind}.{name} is not available on this server: {reason}"
    start = f"import pandas\nvalue = pandas.{kind}([1])\n"
    for use in (f"value.{name}", f"pandas.{kind}.{name}", f"getattr(value, {name!r})"):
        assert refusal(start + use)[0] == expected
    own = f"class Own(pandas.{kind}): pass\nOwn.{name}"
    assert refusal(f"import pandas\n{own}")[0].endswith(reason)


@pytest.mark.parametrize("name", ["to_csv", "eval", "__getattribute__", "_mgr", "genfromtxt"])
@pytest.mark.parametrize(
    "call",
    [
        "frame.agg({!r})",
        "frame.aggregate({!r})",
        "frame.apply({!r})",
        "frame.transform({!r})",
        "frame.agg([{!r}])",
        "frame.agg({{'a': {!r}}})",
        "frame.a.agg({!r})",
        "frame.a.apply({!r})",
        "frame.groupby('b').agg({!r})",
        "frame.groupby('b').agg({{'a': {!r}}})",
        "frame.groupby('b').agg(out=('a', {!r}))",
        "frame.groupby('b').apply({!r})",
        "frame.groupby('b').a.agg({!r})",
        "frame.groupby('b').a.agg([{!r}])",
        "frame.groupby('b').a.filter({!r})",
        "frame.rolling(2).agg({!r})",
        "frame.pivot_table(index='b', aggfunc={!r})",
        "pandas.pivot_table(frame, index='b', aggfunc={!r})",
        "pandas.crosstab(frame.b, frame.b, values=frame.a, aggfunc={!r})",
    ],
)
def test_denied_method_named_by_string_is_refused(call: str, name: str) -> None:
    start = "import pandas\nframe = pandas.DataFrame({'a': [1, 2], 'b': [3, 3]})\n"
    text, _ = refusal(start + call.format(name))
    # Some pandas functions raise their own message.
    refused = (f"{name} is not available on this server", "Transform function failed")
    assert any(
        message in text for message in (*refused, "is not a valid function for 'Rolling'")
    ), text


HARMLESS = {"to_datetime", "to_numeric", "to_timedelta", "to_period", "to_timestamp"}
HARMLESS |= {"to_dict", "to_numpy", "to_records", "to_xarray", "to_frame", "to_list", "to_series"}
HARMLESS |= {"to_flat_index", "from_dict", "from_records", "from_arrow", "from_dummies"}


@pytest.mark.parametrize("kind", ["", ".DataFrame", ".Series", ".Index", ".MultiIndex"])
def test_every_pandas_reader_and_writer_is_denied_or_listed_as_harmless(kind: str) -> None:
    """A new pandas version with a new `read_…` fails this test before users notice."""
    owner = getattr(pandas, kind.strip("."), pandas)
    for name in dir(owner):
        if name.startswith(("read_", "to_", "from_")) and name not in HARMLESS | {"from_tuples"}:
            if name in ("from_arrays", "from_product", "from_frame"):
                continue
            text, _ = refusal(f"import pandas\npandas{kind}.{name}")
            assert "is not available on this server" in text, text


def test_pandas_plotting_backend_is_refused(tmp_path: Path) -> None:
    text, _ = refusal("import pandas\npandas.set_option('plotting.backend', 'antigravity')")
    assert text.startswith("ImportError: plots cannot be made on this server")


def test_einops_exposes_only_listed_modules() -> None:
    scope = guarded(
        "import einops, einops.layers.torch, einops.einops, einops.packing\n"
        "found = []\n"
        "for module in (einops, einops.layers.torch, einops.einops, einops.packing):\n"
        "    for name in dir(module):\n"
        "        try:\n"
        "            found.append(getattr(module, name))\n"
        "        except AttributeError:\n"
        "            pass\n"
    )
    modules = {value.__name__ for value in scope["found"] if isinstance(value, ModuleType)}
    assert modules
    assert not [value for value in modules if WHITELIST.find(value) is None]
    assert "get_backend" not in {getattr(value, "__name__", "") for value in scope["found"]}


PANDAS = {
    "frame": "frame.shape, list(frame.columns), frame.dtypes.astype(str).tolist()",
    "describe": "frame.describe().loc['mean', 'b']",
    "groups": "frame.groupby('layer').mean().to_dict()",
    "groups of one": "frame.groupby('layer')['a'].agg(['mean', 'max']).to_dict()",
    "groups by name": "frame.groupby('layer').agg(top=('a', 'max'), low=('b', 'min')).to_dict()",
    "groups by function": "frame.groupby('layer').apply(lambda each: each.a.sum()).tolist()",
    "groups filtered": "frame.groupby('layer').filter(lambda each: each.a.sum() > 3).shape",
    "groups transformed": "frame.groupby('layer')['a'].transform('mean').tolist()",
    "names of methods": "frame.agg('mean').tolist(), frame.transform('abs').shape, frame.apply('sum').tolist()",
    "functions": "frame.apply(lambda row: row.sum(), axis=1).tolist(), frame.a.map(abs).tolist()",
    "selection": "frame[frame.a > 3].shape, frame.iloc[0, 0], frame.loc[1, 'a'], frame.head(2).a.tolist()",
    "order": "frame.sort_values('a', ascending=False).index.tolist(), frame.rank().a.tolist()",
    "tables": "frame.pivot_table(index='layer', values='a', aggfunc='sum').to_dict()",
    "cross tables": "pd.crosstab(frame.layer, frame.a > 3).to_dict()",
    "joins": "frame.merge(frame, on='layer').shape, pd.concat([frame, frame]).shape, frame.join(frame.add_prefix('x')).shape",
    "windows": "frame.rolling(2).mean().a.dropna().tolist(), frame.a.rolling(2).agg('sum').dropna().tolist()",
    "new columns": "frame.assign(d=lambda each: each.a + each.b).d.tolist()",
    "texts": "str(frame), repr(frame.a), pd.Series(['ab']).str.upper().tolist()",
    "values": "frame.to_numpy().sum(), frame.to_dict('records')[0], [each.a for each in frame.itertuples()]",
    "statistics": "frame.corr().shape, frame.a.quantile([.1, .9]).tolist(), pd.cut(frame.a, 2).cat.codes.tolist()",
    "dates": "pd.to_datetime(['2020-01-02']).year.tolist(), pd.date_range('2020', periods=2).day.tolist()",
    "shapes": "frame.melt().shape, frame.stack().shape, frame.T.shape, frame.copy(deep=True).equals(frame)",
}

EINOPS = {
    "rearrange": "rearrange(x, 'a b c -> (a b) c')",
    "rearrange an array": "rearrange(x.numpy(), 'a b c -> c b a').shape",
    "reduce": "reduce(x, 'a b c -> a', 'mean'), reduce(x, 'a b c -> b', 'max')",
    "reduce by function": "reduce(x, 'a b c -> a', lambda each, axes: each.sum(axes))",
    "repeat": "repeat(x, 'a b c -> a b c n', n=2).shape",
    "einsum": "einsum(x, x, 'a b c, a d c -> a b d')",
    "pack": "unpack(*pack([x, x], 'b * d'), 'b * d')",
    "parse": "parse_shape(x, 'a b _'), asnumpy(x).tolist()",
    "layers": "Rearrange('a b c -> a (b c)')(x), Reduce('a b c -> a', 'sum')(x)",
    "mix": "EinMix('a b c -> a b d', weight_shape='c d', c=4, d=5)(x).shape",
}

FRAME = """
import pandas as pd
frame = pd.DataFrame(activations.numpy(), columns=["a", "b", "c"])
frame["layer"] = [0, 0, 1, 1]
result = ({})
"""

EINOPS_OF = """
from einops import asnumpy, einsum, pack, parse_shape, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
result = ({})
"""


@pytest.mark.parametrize("use", PANDAS)
def test_ordinary_pandas_code_gives_same_result_with_guards(use: str) -> None:
    scope = {"activations": torch.arange(12.0).reshape(4, 3)}
    expected: dict[str, object] = {**scope}
    exec(FRAME.format(PANDAS[use]), expected)
    assert repr(guarded(FRAME.format(PANDAS[use]), **scope)["result"]) == repr(expected["result"])


@pytest.mark.parametrize("use", EINOPS)
def test_ordinary_einops_code_gives_same_result_with_guards(use: str) -> None:
    scope = {"x": torch.arange(24.0).reshape(2, 3, 4)}
    expected: dict[str, object] = {**scope}
    exec(EINOPS_OF.format(EINOPS[use]), expected)
    assert repr(guarded(EINOPS_OF.format(EINOPS[use]), **scope)["result"]) == repr(
        expected["result"]
    )


SENT = {
    "frame": "pd.DataFrame({'layer': [0, 1], 'scale': [1.5, 2.5]})",
    "texts": "pd.DataFrame({'a': ['x', 'y']})",
    "series": "pd.Series([1.0, 2.0], name='n')",
    "categories": "pd.DataFrame({'a': pd.Categorical(['x', 'y'])})",
    "dates": "pd.DataFrame({'a': pd.date_range('2020', periods=2)})",
    "dates as index": "pd.Series([1, 2], index=pd.date_range('2020', periods=2, tz='UTC'))",
    "levels": "pd.DataFrame({'a': [1, 2], 'b': [3, 4], 'c': [1, 2]}).set_index(['a', 'b'])",
    "missing": "pd.DataFrame({'a': pd.array([1, None], dtype='Int64')})",
    "intervals": "pd.cut(pd.Series([1, 2, 3]), 2)",
    "durations": "pd.Series(pd.to_timedelta([1, 2]))",
    "periods": "pd.Series(pd.period_range('2020', periods=2))",
    "moments": "[pd.Timestamp('2020'), pd.Timedelta('1s'), pd.Index([1, 2]), pd.RangeIndex(3)]",
}


@pytest.mark.parametrize("name", SENT)
def test_pandas_object_can_be_sent(name: str) -> None:
    value = eval(SENT[name], {"pd": pandas})
    protector = Protector()
    unpickler = protector.unpickler({})
    content = io.BytesIO(cloudpickle.dumps(value, protocol=4))
    assert repr(unpickler(content, protector.objects({})).load()) == repr(value)
