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

    def __init__(self, known: Sequence[ProcessSetting] | None = None) -> None:
        """Read all settings; a fork may pass the list that its parent has found as `known`."""
        self.known = settings() if known is None else known
        self._threads = torch.get_num_threads()
        self._before: list[tuple[ProcessSetting, Any]] = []
        for setting in self.known:
            with contextlib.suppress(Exception):  # torch on this machine may lack the setting
                self._before.append((setting, setting.read()))

    def restore(self) -> str | None:
        """Stop timers and restore settings; return the name of one that cannot be restored, else None."""
        _stop_timers()
        # Always set: a number set in another thread is invisible here, but applies to later threads.
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
        return [each for each in self._before if not each[0].is_unchanged(each[1])]


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
    rows += [*_of_python(), *_of_torch(), *_of_precision(), *_of_numpy()]
    for device in ("cpu", "cuda"):
        for getter, setter in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        ):
            of_device = functools.partial(getter, device), functools.partial(setter, device)
            rows.append((f"autocast on {device}", *of_device))
    for owner, names in _ATTRIBUTES:
        for name in names:
            reading = functools.partial(getattr, owner, name, None)
            rows.append((name, reading, functools.partial(setattr, owner, name)))
    for name in dir(resource):
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE":
            limit = getattr(resource, name)
            reading = functools.partial(resource.getrlimit, limit)
            rows.append((name, reading, functools.partial(resource.setrlimit, limit)))
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
"""Settings NAME that the functions `getNAME` and `setNAME` of a module read and set."""

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


def _of_python() -> list[_Row]:
    found: list[_Row] = [
        ("asyncgen hooks", sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)),
        ("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        ("gc threshold", gc.get_threshold, lambda limits: gc.set_threshold(*limits)),
        ("decimal context", lambda: repr(decimal.getcontext()), _restorer_of_decimals()),
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
        _of_list(sys, "path"),
        _of_list(gc, "callbacks"),
        ("working directory", _folder, os.chdir),
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
        found.append(("monitoring", lambda: [sys.monitoring.get_tool(tool) for tool in range(6)]))
    return found


def _of_list(owner: types.ModuleType, name: str) -> _Row:
    items: list[Any] = getattr(owner, name)

    def restore(before: list[Any]) -> None:
        items[:] = before
        setattr(owner, name, items)

    return f"{owner.__name__}.{name}", lambda: list(getattr(owner, name)), restore


def _restorer_of_decimals() -> Callable[[str], None]:
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
        self._found: dict[str, tuple[Any, ...]] = {}
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
            if self._found[name] != (now := _logger_settings(logger)):
                self._found = {**self._found, name: now}
        return self._found

    def _may_have_changed(self) -> bool:
        return (
            not self._found
            or logging.root.manager.loggerDict is not self._by_name
            or not all(map(is_, map(vars, self._loggers), self._dicts))
            or bool(self._versions.changed())
            or bool(self._lists.changed())
        )

    def _read_all(self) -> None:
        self._found = {}  # so that a read that fails is repeated
        self._by_name = logging.root.manager.loggerDict
        known = {"": logging.root, **self._by_name}
        found = {name: each for name, each in known.items() if isinstance(each, logging.Logger)}
        settings = {name: _logger_settings(each) for name, each in known.items()}
        self._loggers = [*found.values()]
        self._dicts = [*map(vars, self._loggers)]
        self._versions = DictVersions([self._by_name, *self._dicts])
        # Another list in place of one of these would show in its logger's version.
        self._lists = Lengths(
            [items for each in self._loggers for items in (each.handlers, each.filters)]
        )
        # Loggers with items are compared on each read; an empty list can only change by growing.
        self._with_items = [
            (name, each) for name, each in found.items() if each.handlers or each.filters
        ]
        self._found = settings


def _logger_settings(logger: logging.Logger | logging.PlaceHolder) -> tuple[Any, ...]:
    if isinstance(logger, logging.PlaceHolder):  # stands for a parent that is not created yet
        return (logger,)
    return (
        logger,
        logger.level,
        logger.propagate,
        logger.disabled,
        logger.parent,
        [(each, each.level, each.formatter) for each in logger.handlers],
        list(logger.filters),
    )


def _set_loggers(before: dict[str, tuple[Any, ...]]) -> None:
    """Restore all loggers, and remove new ones except those of newly loaded libraries."""
    by_name = logging.root.manager.loggerDict
    for name, now in [*by_name.items()]:
        known = before.get(name, (None,))[0]
        if isinstance(known, logging.Logger) or now is known:
            continue
        if is_of_a_library(sys.modules.get(name)):
            before[name] = _logger_settings(now)
        elif known is None:
            del by_name[name]
    for name, (logger, *settings) in before.items():
        if name:
            by_name[name] = logger
        if not settings:
            continue
        level, logger.propagate, logger.disabled, logger.parent, handlers, filters = settings
        logger.setLevel(level)
        logger.handlers[:] = [handler for handler, _, _ in handlers]
        for handler, own_level, formatter in handlers:
            handler.level, handler.formatter = own_level, formatter
        logger.filters[:] = filters


def _folder() -> str | None:
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


def _of_torch() -> list[_Row]:
    attention, mha = torch.backends.cuda, torch.backends.mha
    printing = vars(torch._tensor_str.PRINT_OPTS)
    return [
        ("printing of torch", lambda: dict(printing), printing.update),
        ("hooks of all modules", lambda: [dict(hooks) for hooks in _HOOKS], _set_hooks),
        *_of_functions(),
        # Before the function modes: the default device is one of them.
        ("default device", _default_device, _set_default_device),
        ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        ("inference mode", torch.is_inference_mode_enabled),
        ("function modes", lambda: [id(each) for each in _get_current_function_mode_stack()]),
        ("dispatch modes", lambda: [id(each) for each in _get_current_dispatch_mode_stack()]),
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


def _of_functions() -> list[_Row]:
    """Return the settings for functions that transformers replaces while it builds a model."""
    functions = {
        name: value
        for name, value in vars(torch.nn.init).items()
        if isinstance(value, types.FunctionType)
    }
    found = [
        (module, name)
        for of_module, module in sys.modules.items()
        if of_module.startswith("torch.nn.")
        for name, value in functions.items()
        if vars(module).get(name) is value
    ]
    rows = [_of_attributes("functions that initialize weights", [*found, (torch, "linspace")])]
    if (modeling := sys.modules.get("transformers.modeling_utils")) is not None:
        methods = [(modeling.PreTrainedModel, name) for name in ("init_weights", "tie_weights")]
        rows.append(_of_attributes("functions that build models", methods))
    return rows


def _of_attributes(title: str, places: list[tuple[Any, str]]) -> _Row:
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


def _of_precision() -> list[_Row]:
    """Return torch's float32 precision by backend and operation; [] in older versions without it."""
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        return []
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    of_backends = [
        (backend, operation)
        for backend in ("cuda", "mkldnn")
        for operation in ("all", "matmul", "conv", "rnn")
    ]
    return [
        (f"precision of {each}", functools.partial(read, *each), functools.partial(write, *each))
        for each in (("generic", "all"), *of_backends)
    ]


def _flushes_denormal() -> bool:
    return bool(torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0)


def _of_numpy() -> list[_Row]:
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
