"""`python -m ndif.runtime FD`: a model process that talks to its host over file descriptor FD."""

import sys

from ndif.runtime.zygote import main

main(int(sys.argv[1]))
