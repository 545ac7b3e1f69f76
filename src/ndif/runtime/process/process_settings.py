"""Settings of a process that a job may change: Python's, torch's, numpy's; read, and put back."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import decimal
import gc
import locale
import logging
import os
import resource
import signal
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from ndif.runtime.driver import Driver


class Setting(NamedTuple):
    """One thing that can be read and, unless `put` is None, put back."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any] | None


def settings(driver: Driver | None) -> list[Setting]:
    """Return all of them that this Python, torch and numpy have."""
    return [*_of_python(), *_of_the_process(), *_of_torch(driver), *_of_numpy()]


def _of_python() -> Iterator[Setting]:
    yield Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield Setting("trace function", sys.gettrace, sys.settrace)
    yield Setting("profile function", sys.getprofile, sys.setprofile)
    yield Setting("dlopen flags", sys.getdlopenflags, sys.setdlopenflags)
    yield Setting(
        "asyncgen hooks", sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)
    )
    yield Setting(
        "coroutine tracking",
        sys.get_coroutine_origin_tracking_depth,
        sys.set_coroutine_origin_tracking_depth,
    )
    if hasattr(sys, "get_int_max_str_digits"):
        yield Setting("digits of a number", sys.get_int_max_str_digits, sys.set_int_max_str_digits)
    if sys.version_info >= (3, 12):
        tools = range(6)
        yield Setting("monitoring", lambda: [sys.monitoring.get_tool(tool) for tool in tools], None)
    yield Setting(
        "garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()
    )
    yield Setting("gc threshold", gc.get_threshold, lambda limits: gc.set_threshold(*limits))
    yield Setting("gc debug flags", gc.get_debug, gc.set_debug)
    yield Setting("decimal context", lambda: repr(decimal.getcontext()), None)
    yield Setting("exit functions", atexit._ncallbacks, None)
    yield Setting("memory tracing", tracemalloc.is_tracing, lambda _: tracemalloc.stop())
    yield Setting("event loop", lambda: id(asyncio._get_running_loop()), None)
    yield Setting("locale", lambda: locale.setlocale(locale.LC_ALL), _set_locale)
    yield Setting("warnings", lambda: list(warnings.filters), _set_warnings)
    yield Setting("loggers", _loggers, _set_loggers)


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _set_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _loggers() -> dict[str, Any]:
    """Return each logger's settings by its name, and that of the root under ""."""
    found: dict[str, Any] = {"": _logger(logging.root), "disabled": logging.root.manager.disable}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            found[f".{name}"] = _logger(logger)
    return found


def _logger(logger: logging.Logger) -> tuple[Any, ...]:
    return (
        logger.level,
        logger.propagate,
        logger.disabled,
        tuple((each, each.level, each.formatter) for each in logger.handlers),
        tuple(logger.filters),
    )


def _set_loggers(before: Mapping[str, Any]) -> None:
    logging.disable(before["disabled"])
    known = logging.root.manager.loggerDict
    for name, logger in [("", logging.root), *((f".{name}", each) for name, each in known.items())]:
        if not isinstance(logger, logging.Logger):
            continue
        level, propagate, disabled, handlers, filters = before.get(name, _NEW_LOGGER)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        logger.handlers[:] = [handler for handler, _, _ in handlers]
        for handler, own_level, formatter in handlers:
            handler.level, handler.formatter = own_level, formatter
        logger.filters[:] = filters


_NEW_LOGGER = (logging.NOTSET, True, False, (), ())


def _of_the_process() -> Iterator[Setting]:
    yield Setting("working directory", _folder, os.chdir)
    yield Setting("umask", _umask, os.umask)
    yield Setting("environment", lambda: dict(os.environ), _set_environment)
    yield Setting("signal handlers", _handlers, _set_handlers)
    yield Setting(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    yield Setting("limits", _limits, _set_limits)


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - the name alone
    except OSError:
        return None


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _set_environment(before: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _set_handlers(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


_LIMITS = [
    getattr(resource, name)
    for name in dir(resource)
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
]


def _limits() -> list[tuple[int, int]]:
    return [resource.getrlimit(limit) for limit in _LIMITS]


def _set_limits(before: list[tuple[int, int]]) -> None:
    for limit, (soft, hard) in zip(_LIMITS, before, strict=True):
        if resource.getrlimit(limit) != (soft, hard):
            resource.setrlimit(limit, (soft, hard))


def _of_torch(driver: Driver | None) -> Iterator[Setting]:
    yield Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield Setting("inference mode", torch.is_inference_mode_enabled, None)
    yield Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting(
        "function modes",
        lambda: [id(each) for each in _get_current_function_mode_stack()],
        None,
    )
    yield Setting(
        "dispatch modes",
        lambda: [id(each) for each in _get_current_dispatch_mode_stack()],
        None,
    )
    yield Setting("functorch", lambda: torch._C._functorch.peek_interpreter_stack(), None)
    yield Setting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    )
    yield Setting(
        "filling of new memory",
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
    )
    yield Setting("autocast", _autocast, _set_autocast)
    yield Setting("anomaly mode", _anomaly, lambda on: torch.set_anomaly_enabled(*on))
    yield Setting("threads of torch", torch.get_num_threads, torch.set_num_threads)
    yield Setting(
        "precision of float32",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    yield Setting("warnings of torch", torch.is_warn_always_enabled, torch.set_warn_always)
    yield Setting("denormal numbers", _flushes_denormal, torch.set_flush_denormal)
    yield Setting(
        "threads of autograd",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    )
    yield Setting(
        "saved tensors' hooks",
        torch._C._autograd._saved_tensors_hooks_is_enabled,  # type: ignore[attr-defined]
        None,
    )
    yield Setting("backends", _backends, _set_backends)
    yield Setting(
        "random numbers of torch", lambda: _TorchRandom(driver), lambda before: before.restore()
    )


_DEVICES = ("cpu", "cuda")


def _autocast() -> tuple[Any, ...]:
    return (
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in _DEVICES),
    )


def _set_autocast(before: tuple[Any, ...]) -> None:
    torch.set_autocast_cache_enabled(before[0])
    for on, (enabled, dtype) in zip(_DEVICES, before[1:], strict=True):
        torch.set_autocast_enabled(on, enabled)
        torch.set_autocast_dtype(on, dtype)


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _flushes_denormal() -> bool:
    return bool(torch.tensor([1e-310], dtype=torch.float64).mul(1.0).item() == 0)


_FLAGS = [
    (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
    (
        torch.backends.cuda.matmul,
        (
            "allow_tf32",
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        ),
    ),
    (torch.backends.mkldnn, ("deterministic", "allow_tf32")),
]

_SDP = ("flash", "mem_efficient", "math", "cudnn")


def _backends() -> list[Any]:
    found = [getattr(owner, name, None) for owner, names in _FLAGS for name in names]
    found += [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP]
    found += [torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()]
    return found


def _set_backends(before: list[Any]) -> None:
    values = iter(before)
    for owner, names in _FLAGS:
        for name in names:
            value = next(values)
            if getattr(owner, name, None) != value:
                setattr(owner, name, value)
    for name in _SDP:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(next(values))
    torch.backends.mha.set_fastpath_enabled(next(values))
    torch._C._set_mkldnn_enabled(next(values))


class _TorchRandom:
    """The state of torch's generators, on every device that is in use."""

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self._states = [torch.get_rng_state(), *(driver.random_states() if driver else ())]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _TorchRandom)
            and len(self._states) == len(other._states)
            and all(map(torch.equal, self._states, other._states))
        )

    __hash__ = None  # type: ignore[assignment]

    def restore(self) -> None:
        """Restore the states of the generators."""
        cpu, *devices = self._states
        torch.set_rng_state(cpu)
        if self._driver is not None:
            self._driver.set_random_states(devices)


def _of_numpy() -> Iterator[Setting]:
    yield Setting("errors of numpy", np.geterr, lambda before: np.seterr(**before))
    yield Setting("error function of numpy", np.geterrcall, np.seterrcall)
    yield Setting("buffers of numpy", np.getbufsize, np.setbufsize)
    yield Setting(
        "printing of numpy",
        np.get_printoptions,
        lambda before: np.set_printoptions(**_printing(before)),
    )
    yield Setting("random numbers of numpy", _numpy_random, _set_numpy_random)


def _printing(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "override_repr"}


def _numpy_random() -> tuple[Any, ...]:
    state: Any = np.random.get_state(legacy=True)
    name, keys, *others = state
    return name, keys.tobytes(), *others


def _set_numpy_random(before: tuple[Any, ...]) -> None:
    name, keys, *others = before
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *others))


def stop_timers() -> None:
    """End what would send this process a signal, where it may ask for that at all."""
    with contextlib.suppress(OSError):
        signal.alarm(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
