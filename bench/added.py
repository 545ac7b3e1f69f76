"""A client of two servers of one model, in turns: one of many machines, and one of a single one.

Usage: added.py NAME ONE MANY; prints one JSON object.
"""

from __future__ import annotations

import json
import statistics

from strangers import in_turns, medians, one_layer


def main() -> None:
    """Measure a small trace."""
    rounds = in_turns(one_layer)
    many, one = medians(rounds)
    # Of each round by itself: what slows the machine for a second slows both.
    added = statistics.median(there - here for there, here in rounds)
    print(json.dumps({"one": one, "many": many, "added": added}))


main()
