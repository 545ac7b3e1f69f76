"""Comparisons for the scenarios of every generation.

This module imports no client: each process has its own.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)\n    (.+)$', re.MULTILINE)

_ROUND = float(os.environ.get("TESTS_ROUND", "0"))
"""Allowed rounding difference; 0: all bits must be equal."""
PATIENCE_S = 300
"""Bound of every wait, in seconds, as in `tests/waiting.py`, which this process cannot import."""
AT_ONCE_S = 25.0
"""Bound of a wait for no limit of the server; the shortest limit, for frozen processes, is 30 s."""

Raised = TypeVar("Raised", bound=BaseException)


def assert_equal(left: Any, right: Any) -> None:
    """Assert equality in structure, type, dtype and every number."""
    assert type(left) is type(right), (type(left), type(right))
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        close = torch.allclose(left, right, rtol=0, atol=_ROUND) if _ROUND else False
        assert close or torch.equal(left, right), (left - right).abs().max()
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for item, other in zip(left, right, strict=True):
            assert_equal(item, other)
    elif _ROUND and isinstance(left, float):
        assert abs(left - right) <= 100 * _ROUND, (left, right)
    else:
        assert left == right, (left, right)


def raised(run: Callable[[], Any], kind: type[Raised]) -> Raised:
    """Return the error of `kind` that `run` must raise."""
    try:
        run()
    except kind as error:
        return error
    raise AssertionError("no error was raised")


def until(condition: Callable[[], Any], explain: Callable[[], object] = str) -> Any:
    """Wait until `condition` returns something true, and return it; fail with `explain` otherwise."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
    return value


def time_passes(seconds: float) -> None:
    """Let real time pass; a longer sleep must never make a test fail."""
    time.sleep(seconds)


def frames(message: str) -> list[tuple[str, int, str, str]]:
    """Return file, line, function and source line of every frame in a traceback."""
    return [(file, int(line), name, text) for file, line, name, text in _FRAME.findall(message)]


def place(function: Callable[..., Any], text: str) -> tuple[str, int, str, str]:
    """Return the frame that a traceback must show for the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function)
    [(number, line)] = [(first + i, line) for i, line in enumerate(lines) if text in line]
    return inspect.getfile(function), number, function.__name__, line.strip()
