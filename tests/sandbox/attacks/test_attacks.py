"""Every attack on every server for which the table makes a claim (see `table`)."""

from __future__ import annotations

import pytest

from tests.sandbox.attacks.harness import (
    CONFIGURATIONS,
    NONE,
    Configuration,
    Results,
    faults,
    run,
)
from tests.sandbox.attacks.table import ATTACKS, Attack, Defence

pytestmark = [pytest.mark.process, pytest.mark.slow]

CASES = [
    pytest.param(attack, configuration, id=f"{attack.name}-{configuration.name}")
    for attack in ATTACKS
    for configuration in CONFIGURATIONS
    if configuration.runs(attack)
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Results:
    """The verdicts of the selected attacks, run on all servers in parallel."""
    chosen = {
        (item.callspec.params["attack"].name, item.callspec.params["configuration"].name)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and "configuration" in item.callspec.params
    }
    attacks = [attack for attack in ATTACKS if any(name == attack.name for name, _ in chosen)]
    names = {name for _, name in chosen}
    return run(
        attacks, [configuration for configuration in CONFIGURATIONS if configuration.name in names]
    )


@pytest.mark.parametrize(("attack", "configuration"), CASES)
def test_attack_is_stopped_by_each_claimed_defence(
    attack: Attack, configuration: Configuration, verdicts: Results
) -> None:
    """Each claimed defence stops the attack; without any defence, the attack must succeed."""
    found_verdicts = verdicts[attack.name, configuration.name]
    assert found_verdicts
    assert not [
        fault for verdict in found_verdicts for fault in faults(attack, configuration, verdict)
    ]


def test_attack_table_is_complete() -> None:
    """Every row is unique, has a description, and claims a defence."""
    names = [attack.name for attack in ATTACKS]
    assert len(names) == len({*names})
    assert len(names) >= 90
    for attack in ATTACKS:
        assert attack.how, attack.name
        assert attack.aim, attack.name
        assert attack.stopped_by != Defence(0), attack.name
        assert NONE.runs(attack)
