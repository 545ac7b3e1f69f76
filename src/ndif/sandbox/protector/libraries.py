"""Guards in libraries that look up attributes by name: pandas, copy, sympy, str.format and operator.

pandas takes `agg("mean")` for a method, and `agg("to_csv")` too; `copy` calls the function that an object's
`__reduce_ex__` names, and sets the attributes that it names. No guard of a block sees such a call, so these
replace functions of the libraries in this process, for every caller, and refuse only what a block may not
do.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import string
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from ndif.sandbox.protector.names import FORMAT_METHODS, words
from ndif.sandbox.protector.transformer import private
from ndif.sandbox.protector.whitelist import Whitelist

_GROUP_METHODS = ("agg", "aggregate", "apply", "filter")
"""Methods of pandas groups that take the name of another method."""


def guard_pandas(whitelist: Whitelist) -> None:
    """Make pandas check the name of every method that it looks up."""
    apply: Any = importlib.import_module("pandas.core.apply")
    if getattr(apply.Apply._apply_str, "guarded", False):
        return

    def check(value: Any, name: str) -> None:
        reason = "it is private" if private(name) else whitelist.of_class(type(value)).get(name)
        if reason is None and not hasattr(value, name):
            # pandas falls back to a function of numpy.
            reason = whitelist.modules["numpy"].reason(f"numpy.{name}")
        if reason is not None:
            raise AttributeError(
                f"{type(value).__name__}.{name} is not available on this server: {reason}"
            )

    named = apply.Apply._apply_str

    def apply_str(self: Any, obj: Any, func: str, *arguments: Any, **options: Any) -> Any:
        check(obj, func)
        return named(self, obj, func, *arguments, **options)

    apply_str.guarded = True  # type: ignore[attr-defined]
    apply.Apply._apply_str = apply_str
    generic: Any = importlib.import_module("pandas.core.groupby.generic")
    for kind in (generic.SeriesGroupBy, generic.DataFrameGroupBy):
        for name in _GROUP_METHODS:
            setattr(kind, name, _checking(getattr(kind, name), check))
    plotting: Any = importlib.import_module("pandas.plotting._core")
    plotting._load_backend = _no_backend


def _checking(method: Callable[..., Any], check: Callable[[Any, str], None]) -> Callable[..., Any]:
    def checked(self: Any, func: Any = None, *arguments: Any, **options: Any) -> Any:
        if isinstance(func, str):
            check(self, func)
            # `filter` looks the name up on the groups' own frames.
            check(self.obj, func)
        return method(self, func, *arguments, **options)

    checked.__name__ = method.__name__
    checked.__doc__ = method.__doc__
    return checked


def _no_backend(backend: str) -> None:
    raise ImportError(
        "plots cannot be made on this server: no plotting library is available; save the data and plot it "
        "on your machine"
    )


def guard_data_loaders() -> None:
    """Make a DataLoader load in this process, whatever number of workers it asks for."""
    data: Any = importlib.import_module("torch.utils.data.dataloader")
    if not isinstance(data._MultiProcessingDataLoaderIter, type):
        return
    single = data._SingleProcessDataLoaderIter

    def load_here(loader: Any) -> Any:
        # A loader's class may be the user's, and define how attributes are set.
        object.__setattr__(loader, "num_workers", 0)
        object.__setattr__(loader, "timeout", 0)
        return single(loader)

    data._MultiProcessingDataLoaderIter = load_here
    # A context of multiprocessing starts processes for whoever has it.
    data.DataLoader.multiprocessing_context = property(lambda _: None, lambda *_: None)


def guard_scipy() -> None:
    """Make scipy compute in this process, whatever number of workers it is asked for."""
    util: Any = importlib.import_module("scipy._lib._util")
    start = util.MapWrapper.__init__
    if getattr(start, "guarded", False):
        return

    def start_here(self: Any, pool: Any = 1) -> None:
        start(self, pool if callable(pool) else 1)

    start_here.guarded = True  # type: ignore[attr-defined]
    util.MapWrapper.__init__ = start_here


def guard_scikit() -> None:
    """Make scikit-learn compute in this process, keep no files, and read parameters of estimators alone."""
    joblib: Any = importlib.import_module("joblib")
    base: Any = importlib.import_module("sklearn.base")
    start, parameters = joblib.Parallel.__init__, base.BaseEstimator.get_params
    if getattr(parameters, "guarded", False):
        return

    def start_here(self: Any, *_: Any, return_as: str = "list", **__: Any) -> None:
        start(self, n_jobs=1, return_as=return_as)

    def keep_nothing(self: Any, location: Any = None, *_: Any, **__: Any) -> None:
        if location is not None:
            raise AttributeError("memory= is not available on this server: it writes files")
        keep(self, None, verbose=0)

    def get_params(self: Any, deep: bool = True) -> dict[str, Any]:
        if not issubclass(type(self), base.BaseEstimator):
            raise TypeError("get_params() takes an estimator")
        found: dict[str, Any] = parameters(self, deep=deep)
        # The names are those of the constructor's parameters, and a user's class may have any other base.
        own = object.__getattribute__(self, "__dict__")
        for name in found:
            if "__" not in name and (private(name) or name not in own):
                raise AttributeError(
                    f"{type(self).__name__}.{name} is no parameter that its constructor has stored"
                )
        return found

    keep = joblib.Memory.__init__
    get_params.guarded = True  # type: ignore[attr-defined]
    joblib.Parallel.__init__ = start_here
    joblib.Memory.__init__ = keep_nothing
    base.BaseEstimator.get_params = get_params


def guard_copying(owns: Callable[[Any], bool]) -> None:
    """Make `copy` turn a user's object only into another user's object; `owns` recognises them."""
    _owners.append(owns)
    copy._reconstruct = _reconstruct  # type: ignore[attr-defined]


_owners: list[Callable[[Any], bool]] = []
_original: Callable[..., Any] = copy._reconstruct  # type: ignore[attr-defined]


def _reconstruct(x: Any, memo: Any, func: Any, arguments: Any, *rest: Any, **options: Any) -> Any:
    if not _owned(x):
        return _original(x, memo, func, arguments, *rest, **options)

    def made(*given: Any) -> Any:
        value = func(*given)
        if not _owned(value):
            raise TypeError(
                f"an object of the class {type(x).__name__!r} cannot be copied on this server: its "
                "__reduce_ex__ makes an object of a class that your own code does not define; define "
                "__copy__ or __deepcopy__ instead"
            )
        return value

    return _original(x, memo, made, arguments, *rest, **options)


def _owned(value: Any) -> bool:
    return any(owns(value) for owns in _owners)


def guard_wrapping() -> None:
    """Make `functools.wraps` copy attributes of functions alone.

    Those of a class or an object would be those of the wrapper, of which nothing is denied.
    """
    if not getattr(functools.update_wrapper, "guarded", False):
        functools.update_wrapper = _update_wrapper  # type: ignore[assignment]


_wrap: Callable[..., Any] = functools.update_wrapper
_COPIED = (FunctionType, BuiltinFunctionType, type(functools.cache(_wrap)))
"""Classes of functions, whose attributes a wrapper gets."""


def _update_wrapper(
    wrapper: Any,
    wrapped: Any,
    assigned: Sequence[str] = functools.WRAPPER_ASSIGNMENTS,
    updated: Sequence[str] = functools.WRAPPER_UPDATES,
) -> Any:
    """Replace `functools.update_wrapper`."""
    function = wrapped.__func__ if type(wrapped) is MethodType else wrapped
    copied = updated if type(function) in _COPIED else ()
    return _wrap(wrapper, wrapped, assigned, copied)


_update_wrapper.guarded = True  # type: ignore[attr-defined]


_ALLOWED_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator,
    ast.unaryop, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.Tuple, ast.List, ast.Dict, ast.Set,
    ast.Attribute, ast.keyword, ast.Subscript, ast.Slice, ast.IfExp, ast.Starred,
)  # fmt: skip

_DENIED_NAMES = words("lambdify sympify parse_expr preview plot S source test")


def guard_sympy() -> None:
    """Make sympy check every string that it evaluates as an expression."""
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    parser.eval_expr = _evaluate


def _evaluate(code: str, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
    """Evaluate an expression of calls, operators and numbers; in place of sympy's `eval_expr`."""
    tree = ast.parse(code, mode="eval")
    for node in ast.walk(tree):
        allowed = isinstance(node, _ALLOWED_NODES)
        if isinstance(node, ast.Attribute):
            allowed = not node.attr.startswith("_")
        elif isinstance(node, ast.Name):
            allowed = not node.id.startswith("_") and node.id not in _DENIED_NAMES
        if not allowed:
            raise SyntaxError(
                "on this server, a string for sympy must be an expression of names, numbers, operators and "
                "calls"
            )
    names = {
        name: value
        for name, value in global_dict.items()
        if not isinstance(value, BuiltinFunctionType) and name not in _DENIED_NAMES
    }
    expression = compile(tree, "<sympy>", "eval")
    # Only allowed nodes and names are left.
    return eval(expression, {**names, "__builtins__": {}}, local_dict)  # noqa: S307


class GuardedLookups(string.Formatter):
    """Guarded forms of `str.format`, `operator.attrgetter` and `operator.methodcaller`."""

    def __init__(self, read: Callable[[Any, str], Any], item: Callable[[Any, Any], Any]) -> None:
        self._read = read
        self._item = item

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, int | str]:
        """Return the value of a field ("0.name[key]"), and the field's first part."""
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, name in rest:
            value = self._read(value, name) if is_attribute else self._item(value, name)
        return value, first

    def format_map(self, text: str, mapping: Mapping[str, Any]) -> str:
        """Replace `str.format_map`."""
        return self.vformat(text, (), mapping)

    def guarded(self, result: Any) -> Any:
        """Return `result`, or its guarded form if `result` is a format method of `str`."""
        if result is str.format:
            return self.format
        if result is str.format_map:
            return self.format_map
        if type(result) is BuiltinFunctionType and result.__name__ in FORMAT_METHODS:
            text = result.__self__
            if isinstance(text, str):
                return functools.partial(getattr(self, result.__name__), text)
        return result

    def attrgetter(self, *paths: str) -> Callable[[Any], Any]:
        """Replace `operator.attrgetter`, with a guard for every name of a path."""

        def walk(value: Any, path: str) -> Any:
            return functools.reduce(self._read, path.split("."), value)

        if not all(isinstance(path, str) for path in paths):
            raise TypeError("attribute name must be a string")
        if len(paths) == 1:
            return lambda value: walk(value, paths[0])
        return lambda value: tuple(walk(value, path) for path in paths)

    def methodcaller(self, name: str, /, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Replace `operator.methodcaller`, with a guard for the name."""
        return lambda value: self._read(value, name)(*arguments, **options)
