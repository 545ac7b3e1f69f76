"""`python -m tests.sandbox.attacks [PART OF A NAME]…`: run every attack once, print the table."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from tests.sandbox.attacks.harness import CONFIGURATIONS, faults, run
from tests.sandbox.attacks.table import ATTACKS


def main() -> int:
    """Return the exit code: 1 if any outcome differs from the table's claims."""
    parts = sys.argv[1:]
    attacks = [
        attack for attack in ATTACKS if not parts or any(part in attack.name for part in parts)
    ]
    started = time.monotonic()
    results = run(attacks, CONFIGURATIONS)
    table = Table("name", "aim", *(configuration.name for configuration in CONFIGURATIONS))
    wrong = []
    for attack in attacks:
        cells = []
        for configuration in CONFIGURATIONS:
            verdicts = results.get((attack.name, configuration.name), [])
            problems = [
                fault for verdict in verdicts for fault in faults(attack, configuration, verdict)
            ]
            wrong += [f"{attack.name} on {configuration.name}: {fault}" for fault in problems]
            text = ", ".join(dict.fromkeys(verdict.short for verdict in verdicts)) or "-"
            cells.append(f"[red]{text}[/]" if problems else text)
        table.add_row(attack.name, attack.aim, *cells)
    console = Console(width=160)
    console.print(table)
    for problem in wrong:
        console.print(problem, markup=False, soft_wrap=True)
    console.print(
        f"{len(attacks)} attacks, {len(wrong)} faults, {time.monotonic() - started:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
