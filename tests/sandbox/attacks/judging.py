"""What the table claims of a verdict."""

from __future__ import annotations

import re
from pathlib import Path

from tests.sandbox.attacks.harness import (
    BOTH,
    KERNEL,
    NONE,
    PATIENCE_S,
    PROTECTOR,
    ROOT,
    Configuration,
    Verdict,
)
from tests.sandbox.attacks.table import Attack, Layer

OF_OURS = (str(ROOT / "src"), "site-packages", str(Path(re.__file__).parents[1]))
"""What no user is shown."""
_CRASHED = "The process that ran your block"


def faults(attack: Attack, configuration: Configuration, verdict: Verdict) -> list[str]:
    """What is not as it should be."""
    outcome = verdict.outcome
    found = []
    if outcome.hung and configuration is NONE and Layer.LIMIT in attack.stopped_by:
        return []  # it goes on for as long as nothing limits it, which is what it wants
    if outcome.hung:
        return [f"it did not end within {PATIENCE_S:g} s"]
    if configuration is NONE:
        if Layer.FRAMES in attack.stopped_by:
            if not re.search(attack.says, outcome.error or "", re.DOTALL):
                found.append(f"proves nothing: it did not get as far as {attack.says!r}: {outcome}")
        elif verdict.reached is None:
            found.append(f"proves nothing: it fails where nothing stops it: {outcome}")
        return found
    if verdict.reached is not None:
        found.append(f"not stopped ({verdict.form}): {verdict.reached}")
    if verdict.next_request is not None:
        found.append(f"the next request is answered otherwise: {verdict.next_request}")
    text = outcome.error or ""
    if shown := [each for each in OF_OURS if each in text]:
        found.append(f"the error shows {shown}: {text[-300:]}")
    if configuration is KERNEL and attack.says and not re.search(attack.says, text, re.DOTALL):
        found.append(f"its error does not say {attack.says!r}: {text[-300:]!r}")
    if configuration is PROTECTOR and Layer.PROTECTOR in attack.stopped_by:
        # What no error can carry, as one in `__del__`, is told in the log.
        if outcome.error is None and not outcome.heard:
            found.append(f"no error says that it is forbidden: {outcome}")
        elif _CRASHED in text:
            found.append(f"it ended in a crash: {text[-300:]!r}")
    if configuration is BOTH and outcome.seconds > PATIENCE_S / 2:
        found.append(f"it took {outcome.seconds:.1f} s")
    return found
