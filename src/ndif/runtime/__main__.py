"""A model process, or a fork server for model processes.

Usage: python -m ndif.runtime FD [--fork-server GENERATION [--untrusted]]

The process talks to its host over the socket FD.
"""

import sys

if sys.argv[2:]:
    from ndif.runtime.process import fork_server

    fork_server.main(int(sys.argv[1]), sys.argv[3], untrusted=fork_server.UNTRUSTED in sys.argv)
else:
    from ndif.runtime.process import zygote

    zygote.main(int(sys.argv[1]))
