"""Rounds with and without another program's work: `python -m tests.bench.rounds PID` prints the samples.

Process PID works in `BUSY_ROUNDS` and is stopped in all others. Each sample is the number of its round.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys

from bench.sampling import in_turn

from tests.waiting import time_passes

ROUNDS = 5
BUSY_ROUNDS = (1, 3)


def main(pid: int) -> None:
    numbers = itertools.count()

    def sample() -> float:
        number = next(numbers)
        os.kill(pid, signal.SIGCONT if number in BUSY_ROUNDS else signal.SIGSTOP)
        time_passes(0.3)
        os.kill(pid, signal.SIGSTOP)
        return float(number)

    print(json.dumps(in_turn({"a way": sample}, rounds=ROUNDS, warm_up=0, pause_s=0.0).to_json()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
