"""A model process, or a server that forks them.

Usage: python -m ndif.runtime FD [--fork-server GENERATION [--untrusted]]

Either talks to its host over file descriptor FD.
"""

import sys

if sys.argv[2:]:
    from ndif.runtime.process import fork_server

    fork_server.main(int(sys.argv[1]), sys.argv[3], untrusted=fork_server.UNTRUSTED in sys.argv)
else:
    from ndif.runtime.process import zygote

    zygote.main(int(sys.argv[1]))
