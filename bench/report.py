"""Reports of `python -m bench`, as files."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench.figures import Figure

RESULTS = Path(__file__).parent / "results"
LATEST = RESULTS / "latest.json"


@dataclass(frozen=True)
class Report:
    """The figures of one run, and its machine."""

    machine: dict[str, Any]
    """A result of `bench.machine_state.machine_state`."""
    began: float
    seconds: float
    figures: list[Figure]

    @staticmethod
    def read(path: Path) -> Report:
        """Return the report in a file.

        Raises:
            ValueError: If the file has no report; the message is a sentence.
        """
        try:
            content = json.loads(path.read_text())
            names = {field.name for field in fields(Figure)}
            figures = [
                Figure(**{name: value for name, value in row.items() if name in names})
                for row in content["figures"]
            ]
            machine = content["machine"]
            # A report in an older form has only a part of the fields.
            machine["cpu"], machine["memory_bytes"], machine["loop_seconds"]
            return Report(machine, content["began"], content["seconds"], figures)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of `python -m bench`.") from error

    @staticmethod
    def of_runs(paths: Sequence[Path]) -> Report:
        """Return one report of several runs of a commit; its figures are medians of all samples.

        Machine, order and explanations come from the last run.

        Raises:
            ValueError: If a file is not a report, or if two reports have different commits.
        """
        runs = [Report.read(path) for path in paths]
        if len({run.machine["commit"] for run in runs}) > 1:
            raise ValueError(f"{' and '.join(map(str, paths))} are not of one commit.")
        alike: defaultdict[tuple[str, str], list[Figure]] = defaultdict(list)
        for run in runs:
            for figure in run.figures:
                alike[figure.scenario, figure.name].append(figure)
        figures = [_of_runs(alike[figure.scenario, figure.name]) for figure in runs[-1].figures]
        seconds = sum(run.seconds for run in runs)
        return Report(runs[-1].machine, runs[0].began, seconds, figures)

    def write(self, path: Path) -> None:
        """Write the report to a file."""
        figures = [{**asdict(figure), "holds": figure.holds} for figure in self.figures]
        path.write_text(json.dumps({**vars(self), "figures": figures}, indent=1) + "\n")


def _of_runs(figures: Sequence[Figure]) -> Figure:
    """Return a figure of several runs; if each run measured it once, their values are its samples."""
    if len(figures) == 1:
        return figures[0]
    samples = [value for figure in figures for value in figure.samples or [figure.value]]
    how = f"{figures[-1].how}; {len(figures)} runs".removeprefix("; ")
    return replace(figures[-1], value=statistics.median(samples), samples=samples, how=how)
