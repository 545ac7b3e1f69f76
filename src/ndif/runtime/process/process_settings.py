"""Process-wide settings of Python, torch and numpy that a request may change, and how to restore them."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # no stubs
import asyncio
import contextlib
import decimal
import functools
import gc
import locale
import logging
import os
import resource
import signal
import sys
import threading
import tracemalloc
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ndif.runtime.process.libraries import is_of_a_library
from ndif.runtime.process.namespaces import DictVersions, Lengths

_ATTEMPTS = 2
"""Attempts to restore changed settings; more than one, because one setting may change another."""


class ProcessSettings:
    """The settings of this process, with their values at the creation of this object."""

    def __init__(self, inherited: Sequence[ProcessSetting] | None = None) -> None:
        """Read all settings; a fork may pass the list of its parent as `inherited`."""
        self.settings = settings() if inherited is None else inherited
        self._threads = torch.get_num_threads()
        self._before: list[tuple[ProcessSetting, Any]] = []
        for setting in self.settings:
            with contextlib.suppress(Exception):  # torch on this machine may lack the setting
                self._before.append((setting, setting.read()))

    def restore(self) -> str | None:
        """Stop timers and restore settings; return the name of a setting that still differs, or None."""
        _stop_timers()
        # Always set: a number that another thread set is invisible here, but applies to later threads.
        torch.set_num_threads(self._threads)
        changed = self._changed()
        for _ in range(_ATTEMPTS if changed else 0):
            for setting, before in changed:
                if setting.restore is not None:
                    with contextlib.suppress(Exception):
                        setting.restore(before)
            changed = self._changed()
        return changed[0][0].name if changed else None

    def _changed(self) -> list[tuple[ProcessSetting, Any]]:
        return [pair for pair in self._before if not pair[0].is_unchanged(pair[1])]


class ProcessSetting(NamedTuple):
    """A setting that can be read and, unless `restore` is None, restored."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any] | None = None

    def is_unchanged(self, before: Any) -> bool:
        """Return True if the setting has the value `before`; False if it can no longer be read."""
        try:
            now = self.read()
            return now is before or bool(now == before)
        except Exception:
            return False


def settings() -> list[ProcessSetting]:
    """Return all settings of this version of Python, torch and numpy.

    States of random generators are not included: each request begins with a new seed.
    """
    rows: list[_Row] = []
    for module, names in _PAIRS:
        for name in names:
            getter, setter = (getattr(module, f"{verb}{name}", None) for verb in ("get", "set"))
            if getter is not None:
                rows.append((f"{module.__name__}.{name}", getter, setter))
    rows += [*_python_rows(), *_torch_rows(), *_precision_rows(), *_numpy_rows()]
    for device in ("cpu", "cuda"):
        for getter, setter in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            accessors = functools.partial(getter, device), functools.partial(setter, device)
            rows.append((f"autocast on {device}", *accessors))
    for owner, names in _ATTRIBUTES:
        for name in names:
            read = functools.partial(getattr, owner, name, None)
            rows.append((name, read, functools.partial(setattr, owner, name)))
    for name in dir(resource):
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE":
            limit = getattr(resource, name)
            read = functools.partial(resource.getrlimit, limit)
            rows.append((name, read, functools.partial(resource.setrlimit, limit)))
    return [ProcessSetting(*row) for row in rows]


_SIGNALS = [int(number) for number in signal.valid_signals()]
"""Plain integers for `_signal`: module `signal` would convert numbers and handlers to enum members."""

_Row = tuple[Any, ...]
"""The arguments of a `ProcessSetting`."""

_PAIRS: list[tuple[Any, tuple[str, ...]]] = [
    (sys, ("recursionlimit", "switchinterval", "trace", "profile", "dlopenflags")),
    (sys, ("_coroutine_origin_tracking_depth", "_int_max_str_digits")),
    (gc, ("_debug",)),
    (torch, ("_default_dtype", "_deterministic_debug_mode", "_num_threads")),
    (torch, ("_float32_matmul_precision",)),
    (np, ("errcall", "bufsize")),
]
"""Settings NAME of a module, which has functions `getNAME` and `setNAME`."""

_ATTRIBUTES: list[tuple[Any, tuple[str, ...]]] = [
    (sys, ("excepthook", "unraisablehook", "displayhook", "breakpointhook")),
    (threading, ("excepthook",)),
    (warnings, ("showwarning", "formatwarning")),
    (logging, ("raiseExceptions", "_logRecordFactory", "_loggerClass")),
    (modules, ("_global_is_full_backward_hook",)),
    (torch.utils.deterministic, ("fill_uninitialized_memory",)),
    (torch.backends.cudnn, ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    (torch.backends.cudnn, ("allow_tf32", "depthwise_kernel")),
    (torch.backends.cuda.matmul, ("allow_tf32", "allow_fp16_accumulation")),
    (torch.backends.cuda.matmul, ("allow_fp16_reduced_precision_reduction",)),
    (torch.backends.cuda.matmul, ("allow_bf16_reduced_precision_reduction",)),
    (torch.backends.mkldnn, ("deterministic", "allow_tf32")),
]
"""Settings that are attributes; an attribute that this version of torch lacks reads as None."""


def _python_rows() -> list[_Row]:
    rows: list[_Row] = [
        ("asyncgen hooks", sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)),
        ("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        ("gc threshold", gc.get_threshold, lambda limits: gc.set_threshold(*limits)),
        ("decimal context", lambda: repr(decimal.getcontext()), _decimal_restorer()),
        ("memory tracing", tracemalloc.is_tracing, lambda _: tracemalloc.stop()),
        ("event loop", lambda: id(asyncio._get_running_loop())),
        (
            "locale",
            lambda: locale.setlocale(locale.LC_ALL),
            lambda name: locale.setlocale(locale.LC_ALL, name),
        ),
        ("warnings", lambda: list(warnings.filters), _set_warnings),
        ("logging", lambda: logging.root.manager.disable, logging.disable),
        ("loggers", _Loggers().read, _set_loggers),
        _list_row(sys, "path"),
        _list_row(gc, "callbacks"),
        ("working directory", _working_directory, os.chdir),
        ("umask", _umask, os.umask),
        ("environment", lambda: dict(os.environ._data), _set_environment),  # type: ignore[attr-defined]
        (
            "signal handlers",
            lambda: {number: _signal.getsignal(number) for number in _SIGNALS},
            _set_handlers,
        ),
        (
            "blocked signals",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        ),
    ]
    if sys.version_info >= (3, 12):
        rows.append(("monitoring", lambda: [sys.monitoring.get_tool(tool) for tool in range(6)]))
    return rows


def _list_row(owner: types.ModuleType, name: str) -> _Row:
    items: list[Any] = getattr(owner, name)

    def restore(before: list[Any]) -> None:
        items[:] = before
        setattr(owner, name, items)

    return f"{owner.__name__}.{name}", lambda: list(getattr(owner, name)), restore


def _decimal_restorer() -> Callable[[str], None]:
    context = decimal.getcontext().copy()
    return lambda _: decimal.setcontext(context.copy())


def _set_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    forget_warnings()


def forget_warnings() -> None:
    """Forget which warnings were shown, so that Python shows all of them again."""
    with warnings.catch_warnings():  # changes the filters' version, which voids all registries
        pass
    warnings.onceregistry.clear()  # type: ignore[attr-defined]


class _Loggers:
    """The settings of all loggers; there are hundreds, so they are read again only after a change."""

    def __init__(self) -> None:
        self._settings: dict[str, tuple[Any, ...]] = {}
        self._by_name: dict[str, Any] = {}
        self._loggers: list[logging.Logger] = []
        self._dicts: list[dict[str, Any]] = []
        self._versions = DictVersions(())
        self._lists = Lengths(())
        self._with_items: list[tuple[str, logging.Logger]] = []

    def read(self) -> dict[str, tuple[Any, ...]]:
        if self._may_have_changed():
            self._read_all()
        for name, logger in self._with_items:
            if self._settings[name] != (now := _logger_settings(logger)):
                self._settings = {**self._settings, name: now}
        return self._settings

    def _may_have_changed(self) -> bool:
        return (
            not self._settings
            or logging.root.manager.loggerDict is not self._by_name
            or not all(map(is_, map(vars, self._loggers), self._dicts))
            or bool(self._versions.changed())
            or bool(self._lists.changed())
        )

    def _read_all(self) -> None:
        self._settings = {}  # so that a read that fails is repeated
        self._by_name = logging.root.manager.loggerDict
        entries = {"": logging.root, **self._by_name}
        loggers = {
            name: entry for name, entry in entries.items() if isinstance(entry, logging.Logger)
        }
        values = {name: _logger_settings(entry) for name, entry in entries.items()}
        self._loggers = [*loggers.values()]
        self._dicts = [*map(vars, self._loggers)]
        self._versions = DictVersions([self._by_name, *self._dicts])
        # If another list replaces a list here, its logger's version changes.
        self._lists = Lengths(
            [items for logger in self._loggers for items in (logger.handlers, logger.filters)]
        )
        # Loggers with items are compared on each read; an empty list can only change by growing.
        self._with_items = [
            (name, logger) for name, logger in loggers.items() if logger.handlers or logger.filters
        ]
        self._settings = values


def _logger_settings(logger: logging.Logger | logging.PlaceHolder) -> tuple[Any, ...]:
    if isinstance(logger, logging.PlaceHolder):  # stands for a parent that is not created yet
        return (logger,)
    return (
        logger,
        logger.level,
        logger.propagate,
        logger.disabled,
        logger.parent,
        [(handler, handler.level, handler.formatter) for handler in logger.handlers],
        list(logger.filters),
    )


def _set_loggers(before: dict[str, tuple[Any, ...]]) -> None:
    """Restore all loggers, and remove new ones, except loggers of newly loaded libraries."""
    by_name = logging.root.manager.loggerDict
    for name, now in [*by_name.items()]:
        earlier = before.get(name, (None,))[0]
        if isinstance(earlier, logging.Logger) or now is earlier:
            continue
        if is_of_a_library(sys.modules.get(name)):
            before[name] = _logger_settings(now)
        elif earlier is None:
            del by_name[name]
    for name, (logger, *values) in before.items():
        if name:
            by_name[name] = logger
        if not values:
            continue
        level, logger.propagate, logger.disabled, logger.parent, handlers, filters = values
        logger.setLevel(level)
        logger.handlers[:] = [handler for handler, _, _ in handlers]
        for handler, own_level, formatter in handlers:
            handler.level, handler.formatter = own_level, formatter
        logger.filters[:] = filters


def _working_directory() -> str | None:
    with contextlib.suppress(OSError):
        return os.getcwd()  # noqa: PTH109 - the name alone
    return None


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _set_environment(before: Mapping[bytes, bytes]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in before.items()})


def _set_handlers(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and _signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_HOOKS: list[dict[int, Any]] = [
    value
    for owner in (modules, optimizers)
    for name, value in vars(owner).items()
    if name.startswith("_global_") and isinstance(value, dict)
]
"""The hooks of all modules and all optimizers."""


def _set_hooks(before: list[dict[int, Any]]) -> None:
    for hooks, earlier in zip(_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(earlier)


def _torch_rows() -> list[_Row]:
    attention, mha = torch.backends.cuda, torch.backends.mha
    printing = vars(torch._tensor_str.PRINT_OPTS)
    return [
        ("printing of torch", lambda: dict(printing), printing.update),
        ("hooks of all modules", lambda: [dict(hooks) for hooks in _HOOKS], _set_hooks),
        *_function_rows(),
        # Before the function modes: the default device is one of them.
        ("default device", _default_device, _set_default_device),
        ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ("inference mode", torch.is_inference_mode_enabled),
        ("function modes", lambda: [id(mode) for mode in _get_current_function_mode_stack()]),
        ("dispatch modes", lambda: [id(mode) for mode in _get_current_dispatch_mode_stack()]),
        ("functorch", torch._C._functorch.peek_interpreter_stack),
        ("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (
            "anomaly mode",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda on: torch.set_anomaly_enabled(*on),
        ),
        ("warnings of torch", torch.is_warn_always_enabled, torch.set_warn_always),
        ("denormal numbers", _flushes_denormal, torch.set_flush_denormal),
        (
            "threads of autograd",
            torch._C._is_multithreading_enabled,
            torch._C._set_multithreading_enabled,
        ),
        ("saved tensors' hooks", torch._C._autograd._saved_tensors_hooks_is_enabled),  # type: ignore[attr-defined]
        *(
            (
                f"attention kernel {kernel}",
                getattr(attention, f"{kernel}_sdp_enabled"),
                getattr(attention, f"enable_{kernel}_sdp"),
            )
            for kernel in ("flash", "mem_efficient", "math", "cudnn")
        ),
        ("attention fastpath", mha.get_fastpath_enabled, mha.set_fastpath_enabled),
        ("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    ]


def _function_rows() -> list[_Row]:
    """Return the settings for functions that transformers replaces while it builds a model."""
    functions = {
        name: value
        for name, value in vars(torch.nn.init).items()
        if isinstance(value, types.FunctionType)
    }
    places = [
        (module, name)
        for module_name, module in sys.modules.items()
        if module_name.startswith("torch.nn.")
        for name, value in functions.items()
        if vars(module).get(name) is value
    ]
    rows = [_attributes_row("functions that initialize weights", [*places, (torch, "linspace")])]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        methods = [(modeling.PreTrainedModel, name) for name in ("init_weights", "tie_weights")]
        rows.append(_attributes_row("functions that build models", methods))
    return rows


def _attributes_row(title: str, places: list[tuple[Any, str]]) -> _Row:
    def restore(before: list[Any]) -> None:
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)

    return title, lambda: [getattr(owner, name) for owner, name in places], restore


def _default_device() -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_default_device(context: Any) -> None:
    torch.set_default_device(None if context is None else context.device)
    if context is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _precision_rows() -> list[_Row]:
    """Return torch's float32 precision by backend and operation; [] in older versions without it."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return []
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    pairs = [
        (backend, operation)
        for backend in ("cuda", "mkldnn")
        for operation in ("all", "matmul", "conv", "rnn")
    ]
    return [
        (f"precision of {pair}", functools.partial(read, *pair), functools.partial(write, *pair))
        for pair in (("generic", "all"), *pairs)
    ]


def _flushes_denormal() -> bool:
    return bool(torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0)


def _numpy_rows() -> list[_Row]:
    return [
        ("errors of numpy", np.geterr, lambda before: np.seterr(**before)),
        ("printing of numpy", np.get_printoptions, _set_printing),
        ("generator of numpy", mtrand.get_bit_generator, mtrand.set_bit_generator),
    ]


def _set_printing(before: Mapping[str, Any]) -> None:
    np.set_printoptions(**{name: before[name] for name in before if name != "override_repr"})


def _stop_timers() -> None:
    """Stop the timers that send signals to this process, if the confinement permits timers at all."""
    with contextlib.suppress(OSError):
        signal.alarm(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
