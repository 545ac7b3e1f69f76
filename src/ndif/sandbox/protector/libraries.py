"""Guards in libraries that look up attributes by name: pandas, copy, sympy, str.format and others.

pandas calls the method that `agg("mean")` names, and `agg("to_csv")` too. `copy` calls the function that an
object's `__reduce_ex__` returns, and sets the attributes that the result names. No guard of a block sees
such a call. So this module replaces functions of libraries in this process, for every caller. The
replacements refuse only calls that a block may not make.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import functools
import importlib
import operator
import os
import re
import string
import sys
from _string import formatter_field_name_split  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from ndif.sandbox.protector import inheritance
from ndif.sandbox.protector.names import FORMAT_METHODS, Variables, words
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

    original = apply.Apply._apply_str

    def apply_str(self: Any, obj: Any, func: str, *arguments: Any, **options: Any) -> Any:
        check(obj, func)
        return original(self, obj, func, *arguments, **options)

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
    """Make every DataLoader load in this process, whatever its `num_workers`."""
    data: Any = importlib.import_module("torch.utils.data.dataloader")
    if not isinstance(data._MultiProcessingDataLoaderIter, type):
        return
    single = data._SingleProcessDataLoaderIter

    def load_here(loader: Any) -> Any:
        # A loader's class may be the user's, with its own `__setattr__`.
        object.__setattr__(loader, "num_workers", 0)
        object.__setattr__(loader, "timeout", 0)
        return single(loader)

    data._MultiProcessingDataLoaderIter = load_here
    # A context of multiprocessing can start processes.
    data.DataLoader.multiprocessing_context = property(lambda _: None, lambda *_: None)


def guard_scipy() -> None:
    """Make scipy compute in this process, whatever its `workers` argument."""
    util: Any = importlib.import_module("scipy._lib._util")
    start = util.MapWrapper.__init__
    if getattr(start, "guarded", False):
        return

    def start_here(self: Any, pool: Any = 1) -> None:
        start(self, pool if callable(pool) else 1)

    start_here.guarded = True  # type: ignore[attr-defined]
    util.MapWrapper.__init__ = start_here


def guard_scikit() -> None:
    """Make scikit-learn compute in this process, keep no files, and read parameters only of estimators."""
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
        values: dict[str, Any] = parameters(self, deep=deep)
        # A user's class sets these names by its constructor's parameters, and may have other bases.
        attributes = object.__getattribute__(self, "__dict__")
        for name in values:
            if "__" not in name and (private(name) or name not in attributes):
                raise AttributeError(
                    f"{type(self).__name__}.{name} is no parameter that its constructor has stored"
                )
        return values

    keep = joblib.Memory.__init__
    get_params.guarded = True  # type: ignore[attr-defined]
    joblib.Parallel.__init__ = start_here
    joblib.Memory.__init__ = keep_nothing
    base.BaseEstimator.get_params = get_params


def guard_copying(owns: Callable[[Any], bool]) -> None:
    """Make `copy` turn a user's object only into a user's object; `owns` returns True for these."""
    _owners.append(owns)
    copy._reconstruct = _reconstruct  # type: ignore[attr-defined]


_owners: list[Callable[[Any], bool]] = []
_original: Callable[..., Any] = copy._reconstruct  # type: ignore[attr-defined]


def _reconstruct(x: Any, memo: Any, func: Any, arguments: Any, *rest: Any, **options: Any) -> Any:
    if not _owned(x):
        return _original(x, memo, func, arguments, *rest, **options)

    def checked(*values: Any) -> Any:
        value = func(*values)
        if not _owned(value):
            raise TypeError(
                f"an object of the class {type(x).__name__!r} cannot be copied on this server: its "
                "__reduce_ex__ makes an object of a class that your own code does not define; define "
                "__copy__ or __deepcopy__ instead"
            )
        return value

    return _original(x, memo, checked, arguments, *rest, **options)


def _owned(value: Any) -> bool:
    return any(owns(value) for owns in _owners)


def guard_redirection() -> None:
    """Make redirections of `contextlib` replace `sys.stdout` or `sys.stderr`, and nothing else in `sys`."""
    contextlib._RedirectStream.__enter__ = _redirect  # type: ignore[method-assign]
    contextlib._RedirectStream.__exit__ = _restore  # type: ignore[method-assign]


def _redirect(self: Any) -> Any:
    stream = _stream_of(self)
    self._old_targets.append(getattr(sys, stream))
    setattr(sys, stream, self._new_target)
    return self._new_target


def _restore(self: Any, *_: object) -> None:
    setattr(sys, _stream_of(self), self._old_targets.pop())


def _stream_of(redirection: Any) -> str:
    stream: str = redirection._stream
    if type(stream) is not str or stream not in ("stdout", "stderr"):
        raise AttributeError("a redirection replaces stdout or stderr on this server")
    return stream


def guard_transformers() -> None:
    """Make transformers raise audit events for code and tokenizers, so that a block loads none.

    See `audit`. Tokenizers need this because other libraries, not transformers, open their files.
    """
    generation: Any = importlib.import_module("transformers.generation.utils")
    load = generation.GenerationMixin.load_custom_generate
    if getattr(load, "guarded", False):
        return

    def load_custom_generate(self: Any, *arguments: Any, **options: Any) -> Any:
        sys.audit(LOADS_CODE)
        return load(self, *arguments, **options)

    load_custom_generate.guarded = True  # type: ignore[attr-defined]
    generation.GenerationMixin.load_custom_generate = load_custom_generate
    dynamic: Any = importlib.import_module("transformers.dynamic_module_utils")
    take = dynamic.get_class_in_module

    def get_class_in_module(*arguments: Any, **options: Any) -> Any:
        sys.audit(LOADS_CODE)
        return take(*arguments, **options)

    dynamic.get_class_in_module = generation.get_class_in_module = get_class_in_module
    for name in ("tokenization_utils_tokenizers", "tokenization_utils_fast"):
        with contextlib.suppress(ImportError):
            backend: Any = importlib.import_module(f"transformers.{name}")
            cls = backend.PreTrainedTokenizerFast
            if not getattr(cls.__init__, "guarded", False):
                cls.__init__ = _reporting(cls.__init__)


LOADS_CODE = "ndif.loads_code"
"""The audit event of a library that is about to run the code of a repository."""


def _reporting(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def reported(self: Any, *arguments: Any, **options: Any) -> None:
        for name in ("tokenizer_file", "vocab_file", "merges_file", "gguf_file"):
            if isinstance(options.get(name), str | os.PathLike):
                sys.audit("open", os.fspath(options[name]), "r", os.O_RDONLY)
        start(self, *arguments, **options)

    reported.guarded = True  # type: ignore[attr-defined]
    return reported


def guard_templates(check: Callable[[Any, str], None]) -> None:
    """Make chat templates read only attributes that a block may read."""
    sandbox: Any = importlib.import_module("jinja2.sandbox")
    permits = sandbox.SandboxedEnvironment.is_safe_attribute
    if getattr(permits, "guarded", False):
        return

    def is_safe_attribute(self: Any, obj: Any, attr: str, value: Any) -> bool:
        try:
            check(obj, str(attr))
        except AttributeError:
            return False
        return bool(permits(self, obj, attr, value))

    is_safe_attribute.guarded = True  # type: ignore[attr-defined]
    sandbox.SandboxedEnvironment.is_safe_attribute = is_safe_attribute


def guard_wrapping() -> None:
    """Make `functools.wraps` copy the `__dict__` of functions only.

    The attributes of any other object would become attributes of the wrapper, where none is denied.
    """
    if not getattr(functools.update_wrapper, "guarded", False):
        functools.update_wrapper = _update_wrapper  # type: ignore[assignment]


_wrap: Callable[..., Any] = functools.update_wrapper
_COPIED = (FunctionType, BuiltinFunctionType, type(functools.cache(_wrap)))
"""Classes of functions, whose `__dict__` a wrapper gets."""


def _update_wrapper(
    wrapper: Any,
    wrapped: Any,
    assigned: Sequence[str] = functools.WRAPPER_ASSIGNMENTS,
    updated: Sequence[str] = functools.WRAPPER_UPDATES,
) -> Any:
    function = wrapped.__func__ if type(wrapped) is MethodType else wrapped
    copied = updated if type(function) in _COPIED else ()
    return _wrap(wrapper, wrapped, assigned, copied)


_update_wrapper.guarded = True  # type: ignore[attr-defined]
# A result refers to the replacement by the name of the original, which the user's process has.
_update_wrapper.__module__, _update_wrapper.__qualname__ = _wrap.__module__, _wrap.__qualname__


_ALLOWED_NODES = (
    ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator,
    ast.unaryop, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.Tuple, ast.List, ast.Dict, ast.Set,
    ast.Attribute, ast.keyword, ast.Subscript, ast.Slice, ast.IfExp, ast.Starred,
)  # fmt: skip

_DENIED_NAMES = words("lambdify sympify parse_expr preview plot S source test")


_GENERATED_NODES = (
    *_ALLOWED_NODES, ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Store,
    ast.Expr, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.comprehension, ast.If, ast.AugAssign,
)  # fmt: skip
"""Syntax of the functions that sympy generates to compute numbers."""

_ARITHMETIC = words("abs bool complex float int len max min pow range round sum")
"""Builtins of generated functions."""

_COMPUTING = words("cmath math mpmath numpy scipy sympy")
"""Modules that generated functions import."""


def guard_sympy() -> None:
    """Make sympy check every text that it evaluates, and every method name by which objects print."""
    parser: Any = importlib.import_module("sympy.parsing.sympy_parser")
    parser.eval_expr = _evaluate
    for name in ("sympy.utilities.lambdify", "sympy.polys.monomials"):
        module: Any = importlib.import_module(name)
        module.compile, module.exec = _compile_generated, _execute_generated
    printer: Any = importlib.import_module("sympy.printing.printer")
    if not getattr(printer.Printer._print, "guarded", False):
        printer.Printer._print = _printing(printer.Printer._print)


def _printing(printed: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, expr: Any, **options: Any) -> Any:
        name = _print_method(self)
        is_users_own = name and re.match("_[a-z]", name) and _owned(expr)
        if name not in (None, *_PRINT_METHODS) and not is_users_own and hasattr(expr, str(name)):
            raise AttributeError(
                f"the printmethod {name!r} of a printer is not available on this server for objects of "
                "classes that your own code does not define"
            )
        return printed(self, expr, **options)

    checked.guarded = True  # type: ignore[attr-defined]
    return checked


def _print_method(printer: Any) -> str | None:
    """Return the name of the method by which a printer prints objects; a user's class may define it."""
    classes = inheritance.bases(type(printer))
    origin = inheritance.definer(classes, "printmethod")
    attributes = object.__getattribute__(printer, "__dict__")
    name = attributes.get(
        "printmethod", None if origin is None else inheritance.content(origin)["printmethod"]
    )
    computed = inheritance.definer(classes, "__getattribute__") is not object
    if computed or not (name is None or type(name) is str):
        raise TypeError("the printmethod of a printer must be a string")
    return name


_PRINT_METHODS = words("""
    _aesara _ccode _cmathcode _cupycode _cxxcode _fcode _glsl _javascript _jaxcode _julia _lambdacode _latex
    _maple _mathml_content _mathml_presentation _mcode _mpmathcode _numexprcode _numpycode _octave _pretty
    _pythoncode _rcode _rust_code _scipycode _smtlib _sympyrepr _sympystr _tensorflowcode _theano _torchcode
""")
"""Methods by which objects of sympy print themselves."""


def _check_generated(text: str) -> ast.Module:
    """Parse a generated function, in which the user chooses names; refuse all but arithmetic."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        allowed = isinstance(node, _GENERATED_NODES)
        if isinstance(node, ast.Constant):
            allowed = isinstance(node.value, int | float | complex | None)
        elif isinstance(node, ast.Attribute):
            is_builtin = isinstance(node.value, ast.Name) and node.value.id == "builtins"
            allowed = node.attr in _ARITHMETIC if is_builtin else not node.attr.startswith("_")
        elif isinstance(node, ast.Name):
            allowed = not node.id.startswith("__")
        elif isinstance(node, ast.Call):
            allowed = not isinstance(node.func, ast.Name) or node.func.id not in _DENIED_NAMES
        if not allowed:
            raise SyntaxError(
                "on this server, the names in an expression of sympy must be identifiers, and its results "
                "must be numbers"
            )
    return tree


def _compile_generated(text: str, filename: str, mode: str) -> CodeType:
    """Replace `compile` where sympy generates functions."""
    code: CodeType = compile(_check_generated(text), filename, "exec")
    return code


def _execute_generated(code: str | CodeType, names: Variables, own: Any = None) -> None:
    """Replace `exec` where sympy generates functions and imports modules for them."""
    if isinstance(code, str):
        tree = ast.parse(code)
        lines = tree.body
        imported = [
            *(statement.module for statement in lines if isinstance(statement, ast.ImportFrom)),
            *(
                name.name
                for statement in lines
                if isinstance(statement, ast.Import)
                for name in statement.names
            ),
        ]
        roots = {str(name).partition(".")[0] for name in imported}
        is_import = all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in lines)
        if is_import and roots <= _COMPUTING:
            exec(code, names, own)  # noqa: S102 - nothing but imports of libraries that compute
            return
        code = _compile_generated(code, "<sympy>", "exec")
    builtin = {name: vars(builtins)[name] for name in _ARITHMETIC}
    exec(code, {**names, "__builtins__": builtin}, names if own is None else own)  # noqa: S102


def _evaluate(code: str, local_dict: Variables, global_dict: Variables) -> Any:
    """Evaluate an expression of calls, operators and numbers; replaces sympy's `eval_expr`."""
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


class Getter:
    """A guarded form of an `operator` getter or caller; the user's process unpickles the original."""

    __slots__ = ("_call", "_original")

    def __init__(self, original: Any, call: Callable[[Any], Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, value: Any) -> Any:
        """Return the result of the guarded lookup on a value."""
        return self._call(value)

    def __repr__(self) -> str:
        return repr(self._original)

    def __reduce__(self) -> Any:
        return self._original.__reduce__()

    # `__reduce__` serves the user's own process; a copy made by it would not be guarded.
    def __deepcopy__(self, *_: object) -> Getter:
        return self

    __copy__ = __deepcopy__


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

        original = operator.attrgetter(*paths)  # which checks the names
        if len(paths) == 1:
            return Getter(original, lambda value: walk(value, paths[0]))
        return Getter(original, lambda value: tuple(walk(value, path) for path in paths))

    def methodcaller(self, name: str, /, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Replace `operator.methodcaller`, with a guard for the name."""
        original = operator.methodcaller(name, *arguments, **options)
        return Getter(original, lambda value: self._read(value, name)(*arguments, **options))
