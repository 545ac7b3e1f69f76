"""A pytest plugin for tests that make up their input: the seed of a run, and how much is made up.

All processes of a run share one seed, which its last lines name. `TEST_SEED` repeats a run.
`make fuzz EXAMPLES=10000` makes up that many examples where the suite makes up fifty.
"""

from __future__ import annotations

import os
import random
import secrets
from importlib.util import find_spec

import pytest

SUITE = 50
"""Examples of a test in the suite, unless it asks for a share of them."""
FUZZ = 1000
_SEED = "TEST_SEED"
_EXAMPLES = "TEST_EXAMPLES"


def seed() -> int:
    """Return the seed of the run; the first call of a run draws it."""
    return int(os.environ.setdefault(_SEED, str(secrets.randbelow(2**32))))


def dice() -> random.Random:
    """Return random numbers that the seed of the run decides."""
    return random.Random(seed())


def examples(share: float) -> int:
    """Return this share of the examples that a test has, for a test that is worth more or costs more."""
    from hypothesis import settings

    return max(1, round(share * settings().max_examples))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if given := getattr(config.option, "hypothesis_seed", None):
        os.environ[_SEED] = given
    seed()  # which processes of xdist inherit
    if find_spec("hypothesis") is None:  # a kit for GPUs has none of the tests that need it
        return
    from hypothesis import HealthCheck, settings

    # A busy machine is no error of what is tested. Nothing but the seed decides what the suite makes up:
    # where the variable CI is set, Hypothesis would make up the same whatever the seed.
    patient = settings(
        deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("suite", patient, max_examples=SUITE, database=None)
    settings.register_profile("fuzz", patient, max_examples=int(os.environ.get(_EXAMPLES, FUZZ)))
    settings.load_profile("suite")
    config.option.hypothesis_seed = str(seed())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"seed {seed()} ({_SEED}={seed()} repeats it)")
