"""Run at the start of every Python process of the tests: fork servers stand in for forks of a template."""

import sys

if "--fork-server" in sys.orig_argv and "ndif.runtime" in sys.orig_argv:
    import stand_in

    stand_in.begin(int(sys.orig_argv[sys.orig_argv.index("ndif.runtime") + 1]))
