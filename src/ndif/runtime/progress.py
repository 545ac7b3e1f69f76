"""How far the loading of a model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.utils import logging


def report(tell: Callable[[int, int], None]) -> None:
    """Call `tell(done, total)` in place of every progress bar that transformers would draw."""

    def bar(factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        made = factory(*args, **{**kwargs, "disable": True})
        total = made.total if hasattr(made, "total") else kwargs.get("total")
        done = 0
        advance = made.update

        def update(count: int = 1) -> Any:
            nonlocal done
            done += count
            if total:
                tell(done, int(total))
            return advance(count)

        made.update = update
        return made

    logging.set_tqdm_hook(bar)
