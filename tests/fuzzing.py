"""A pytest plugin for tests with random input: the seed of a run, and the number of examples.

All processes of a run share one seed, which the run's last lines name. `TEST_SEED` repeats a run.
`make fuzz EXAMPLES=10000` draws that many examples where the suite draws fifty.
"""

from __future__ import annotations

import os
import random
import secrets
from importlib.util import find_spec

import pytest

SUITE = 50
"""Examples of a test in the suite, unless the test asks for a share of them."""
FUZZ = 1000
_SEED = "TEST_SEED"
_EXAMPLES = "TEST_EXAMPLES"


def seed() -> int:
    """Return the seed of the run; the first call of a run draws it."""
    return int(os.environ.setdefault(_SEED, str(secrets.randbelow(2**32))))


def dice() -> random.Random:
    """Return a random number generator with the seed of the run."""
    return random.Random(seed())


def examples(share: float) -> int:
    """Return this share of a test's usual examples, for a test that is worth more or costs more."""
    from hypothesis import settings

    return max(1, round(share * settings().max_examples))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if given := getattr(config.option, "hypothesis_seed", None):
        os.environ[_SEED] = given
    seed()  # processes of xdist inherit the seed
    if find_spec("hypothesis") is None:  # the kit for GPUs has no test that needs Hypothesis
        return
    from hypothesis import HealthCheck, settings

    # A busy machine is not an error of the code under test. Only the seed decides the suite's examples: if
    # the variable CI is set, Hypothesis by default draws the same examples with every seed.
    patient = settings(
        deadline=None, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("suite", patient, max_examples=SUITE, database=None)
    settings.register_profile("fuzz", patient, max_examples=int(os.environ.get(_EXAMPLES, FUZZ)))
    settings.load_profile("suite")
    config.option.hypothesis_seed = str(seed())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"seed {seed()} ({_SEED}={seed()} repeats it)")
