"""Reports of `python -m bench`, as files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.figures import Figure

RESULTS = Path(__file__).parent / "results"
LATEST = RESULTS / "latest.json"


@dataclass(frozen=True)
class Report:
    """The figures of one run, and the machine that they are of."""

    machine: dict[str, Any]
    """As `bench.machine_state.machine_state` has it."""
    began: float
    seconds: float
    figures: list[Figure]

    @staticmethod
    def read(path: Path) -> Report:
        """Return the report in a file.

        Raises:
            ValueError: If there is none; the message is a sentence.
        """
        try:
            said = json.loads(path.read_text())
            known = {field.name for field in fields(Figure)}
            figures = [
                Figure(**{name: value for name, value in each.items() if name in known})
                for each in said["figures"]
            ]
            machine = said["machine"]
            # A report of an older form has a part of it.
            machine["cpu"], machine["memory_bytes"], machine["loop_seconds"]
            return Report(machine, said["began"], said["seconds"], figures)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of `python -m bench`.") from error

    def write(self, path: Path) -> None:
        """Write the report to a file."""
        figures = [{**asdict(figure), "holds": figure.holds} for figure in self.figures]
        path.write_text(json.dumps({**vars(self), "figures": figures}, indent=1) + "\n")
