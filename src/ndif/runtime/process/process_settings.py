"""Process-wide settings of Python, torch and numpy that a request may change, and how to restore them."""

from __future__ import annotations

import asyncio
import atexit
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
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from ndif.runtime.process.cuda import Cuda


class ProcessSetting(NamedTuple):
    """One setting, which can be read and, unless `restore` is None, restored."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any] | None = None

    def is_unchanged(self, before: Any) -> bool:
        """Return True if the setting has the value `before`; False if it can no longer be read."""
        try:
            return bool(self.read() == before)
        except Exception:
            return False


def settings(driver: Cuda | None) -> list[ProcessSetting]:
    """Return all settings that this Python, torch and numpy have."""
    return [*_of_python(), *_of_the_process(), *_of_torch(driver), *_of_numpy()]


def _of_python() -> Iterator[ProcessSetting]:
    yield ProcessSetting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield ProcessSetting("switch interval", sys.getswitchinterval, sys.setswitchinterval)
    yield ProcessSetting("trace function", sys.gettrace, sys.settrace)
    yield ProcessSetting("profile function", sys.getprofile, sys.setprofile)
    yield ProcessSetting("dlopen flags", sys.getdlopenflags, sys.setdlopenflags)
    yield ProcessSetting(
        "asyncgen hooks", sys.get_asyncgen_hooks, lambda hooks: sys.set_asyncgen_hooks(*hooks)
    )
    yield ProcessSetting(
        "coroutine tracking",
        sys.get_coroutine_origin_tracking_depth,
        sys.set_coroutine_origin_tracking_depth,
    )
    if hasattr(sys, "get_int_max_str_digits"):
        yield ProcessSetting(
            "digits of a number", sys.get_int_max_str_digits, sys.set_int_max_str_digits
        )
    if sys.version_info >= (3, 12):
        yield ProcessSetting(
            "monitoring", lambda: [sys.monitoring.get_tool(tool) for tool in range(6)]
        )
    yield ProcessSetting(
        "garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable()
    )
    yield ProcessSetting("gc threshold", gc.get_threshold, lambda limits: gc.set_threshold(*limits))
    yield ProcessSetting("gc debug flags", gc.get_debug, gc.set_debug)
    yield ProcessSetting("decimal context", lambda: repr(decimal.getcontext()))
    yield ProcessSetting("exit functions", atexit._ncallbacks)
    yield ProcessSetting("memory tracing", tracemalloc.is_tracing, lambda _: tracemalloc.stop())
    yield ProcessSetting("event loop", lambda: id(asyncio._get_running_loop()))
    yield ProcessSetting("locale", lambda: locale.setlocale(locale.LC_ALL), _set_locale)
    yield ProcessSetting("warnings", lambda: list(warnings.filters), _set_warnings)
    yield ProcessSetting("loggers", _loggers, _set_loggers)


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _set_warnings(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _loggers() -> dict[str, Any]:
    """Return the settings of each logger by name, and those of the root under ""."""
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
        tuple((handler, handler.level, handler.formatter) for handler in logger.handlers),
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


def _of_the_process() -> Iterator[ProcessSetting]:
    yield ProcessSetting("working directory", _folder, os.chdir)
    yield ProcessSetting("umask", _umask, os.umask)
    yield ProcessSetting("environment", lambda: dict(os.environ), _set_environment)
    yield ProcessSetting("signal handlers", _handlers, _set_handlers)
    yield ProcessSetting(
        "blocked signals",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    for name in dir(resource):
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE":
            limit = getattr(resource, name)
            yield ProcessSetting(
                f"limit {name}",
                functools.partial(resource.getrlimit, limit),
                functools.partial(resource.setrlimit, limit),
            )


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


def _of_torch(driver: Cuda | None) -> Iterator[ProcessSetting]:
    yield ProcessSetting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled)
    yield ProcessSetting("inference mode", torch.is_inference_mode_enabled)
    yield ProcessSetting("default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield ProcessSetting(
        "function modes", lambda: [id(each) for each in _get_current_function_mode_stack()]
    )
    yield ProcessSetting(
        "dispatch modes", lambda: [id(each) for each in _get_current_dispatch_mode_stack()]
    )
    yield ProcessSetting("functorch", torch._C._functorch.peek_interpreter_stack)
    yield ProcessSetting(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    )
    yield _attribute(torch.utils.deterministic, "fill_uninitialized_memory")
    yield ProcessSetting("autocast", _autocast, _set_autocast)
    yield ProcessSetting("anomaly mode", _anomaly, lambda on: torch.set_anomaly_enabled(*on))
    yield ProcessSetting("threads of torch", torch.get_num_threads, torch.set_num_threads)
    yield ProcessSetting(
        "precision of float32",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    )
    yield ProcessSetting("warnings of torch", torch.is_warn_always_enabled, torch.set_warn_always)
    yield ProcessSetting("denormal numbers", _flushes_denormal, torch.set_flush_denormal)
    yield ProcessSetting(
        "threads of autograd",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    )
    yield ProcessSetting(
        "saved tensors' hooks",
        torch._C._autograd._saved_tensors_hooks_is_enabled,  # type: ignore[attr-defined]
    )
    yield from _of_backends()
    yield ProcessSetting(
        "random numbers of torch", lambda: _TorchRandom(driver), lambda before: before.restore()
    )


def _attribute(owner: Any, name: str) -> ProcessSetting:
    """Return the setting that is an attribute; None stands for a version of torch that lacks it."""
    return ProcessSetting(
        name,
        functools.partial(getattr, owner, name, None),
        functools.partial(setattr, owner, name),
    )


_FLAGS: list[tuple[Any, tuple[str, ...]]] = [
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

_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _of_backends() -> Iterator[ProcessSetting]:
    for owner, names in _FLAGS:
        for name in names:
            yield _attribute(owner, name)
    for kernel in _ATTENTION_KERNELS:
        yield ProcessSetting(
            f"attention kernel {kernel}",
            getattr(torch.backends.cuda, f"{kernel}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp"),
        )
    mha = torch.backends.mha
    yield ProcessSetting("attention fastpath", mha.get_fastpath_enabled, mha.set_fastpath_enabled)
    yield ProcessSetting("mkldnn", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled)


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


class _TorchRandom:
    """The state of torch's random generators on every device in use."""

    def __init__(self, driver: Cuda | None) -> None:
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
        """Set the generators to this state."""
        cpu, *devices = self._states
        torch.set_rng_state(cpu)
        if self._driver is not None:
            self._driver.set_random_states(devices)


def _of_numpy() -> Iterator[ProcessSetting]:
    yield ProcessSetting("errors of numpy", np.geterr, lambda before: np.seterr(**before))
    yield ProcessSetting("error function of numpy", np.geterrcall, np.seterrcall)
    yield ProcessSetting("buffers of numpy", np.getbufsize, np.setbufsize)
    yield ProcessSetting(
        "printing of numpy",
        np.get_printoptions,
        lambda before: np.set_printoptions(**_printing(before)),
    )
    yield ProcessSetting("random numbers of numpy", _numpy_random, _set_numpy_random)


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
    """Stop the timers that send this process signals, if the confinement permits timers at all."""
    with contextlib.suppress(OSError):
        signal.alarm(0)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
