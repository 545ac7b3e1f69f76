"""How much the CUDA contexts of a replica take."""

from __future__ import annotations

import pytest

from ndif.config import MiB, Settings
from ndif.host.contexts import context_bytes


@pytest.mark.parametrize(
    ("untrusted", "trusted", "processes"),
    [(False, True, 3), (True, False, 4), (True, True, 6)],
)
def test_each_process_has_one(untrusted: bool, trusted: bool, processes: int) -> None:
    settings = Settings(gpu_context_bytes=100 * MiB, runner_pool=2)
    assert context_bytes(settings, untrusted=untrusted, trusted=trusted) == processes * 100 * MiB


def test_runners_that_wait_count() -> None:
    settings = Settings(runner_pool=6, runner_scope="request")
    assert context_bytes(settings, untrusted=True, trusted=False) == 7 * 512 * MiB
    # And the one that a key has for itself.
    settings = Settings(runner_pool=6)
    assert context_bytes(settings, untrusted=True, trusted=False) == 8 * 512 * MiB
