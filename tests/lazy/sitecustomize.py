"""Run at the start of every Python process of the tests: a fork server imports once it is asked to fork.

It imports torch, transformers and nnsight at once where it serves users. Most servers of the tests never
load a model.
"""

import select
import sys

if "--fork-server" in sys.orig_argv and "ndif.runtime" in sys.orig_argv:
    channel = int(sys.orig_argv[sys.orig_argv.index("ndif.runtime") + 1])
    select.select([channel], [], [])
