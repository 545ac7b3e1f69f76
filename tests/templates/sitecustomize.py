"""Run at the start of every Python process of the tests: fork servers stand in for forks of a template."""

import os
import sys

if "--fork-server" in sys.orig_argv and "ndif.runtime" in sys.orig_argv:
    if "TEST_TEMPLATE" in os.environ:
        import template

        template.begin()
    else:
        import stand_in

        stand_in.begin(int(sys.orig_argv[sys.orig_argv.index("ndif.runtime") + 1]))
