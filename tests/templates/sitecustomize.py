"""Code at the start of every Python process of the tests: some processes stand in for forks of a template.

These processes are fork servers and probes, which import torch and transformers.
"""

import os
import sys

_PROBE = ["-m", "ndif.probe.trace"]

if "--fork-server" in sys.orig_argv and "ndif.runtime" in sys.orig_argv:
    if "TEST_TEMPLATE" in os.environ:
        import template

        template.of_fork_servers()
    else:
        import stand_in

        stand_in.begin(int(sys.orig_argv[sys.orig_argv.index("ndif.runtime") + 1]))
elif sys.orig_argv[1:] == _PROBE:
    if "TEST_TEMPLATE" in os.environ:
        import template

        template.of_probes()
    else:
        import stand_in

        stand_in.begin()
