"""How far the loading of a model is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils import logging

_EVERY_S = 0.05


class _Bar:
    """Counts for a progress bar of tqdm's, and draws nothing."""

    def __init__(self, tell: Callable[[int, int], None], args: Any, kwargs: Any) -> None:
        self._tell = tell
        self._items = args[0] if args else kwargs.get("iterable")
        total = kwargs.get("total")
        self.total = (
            len(self._items) if total is None and hasattr(self._items, "__len__") else total
        )
        self.n = 0
        self._told = 0.0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        """Count; tell it now and then, and when all is done."""
        self.n += count
        now = time.monotonic()
        if self.total and (now - self._told > _EVERY_S or self.n >= self.total):
            self._told = now
            self._tell(self.n, int(self.total))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Whatever else a bar can do is about how it looks."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def report(tell: Callable[[int, int], None]) -> None:
    """Call `tell(done, total)` in place of every progress bar that transformers would draw."""
    logging.set_tqdm_hook(lambda _, args, kwargs: _Bar(tell, args, kwargs))
