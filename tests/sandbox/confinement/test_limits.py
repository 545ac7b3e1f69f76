"""The thread limit of a confined process whose user has other processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

# A runner is forked and confined, other processes of its user start threads, then it starts threads.
SCRIPT = """
import os, sys, threading
from ndif.sandbox.confinement import limits
if os.getuid() == 0:  # whom the kernel counts nothing of
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
before, during = int(sys.argv[1]), int(sys.argv[2])
threading.stack_size(1 << 16)
over = threading.Event()
def begin(count):
    for _ in range(count):
        threading.Thread(target=over.wait).start()
if before:
    # Such as no /proc shows: of another container.
    limits._count_user_tasks = lambda: 0
    limits._OTHER_PROCESSES_MARGIN = 0
    begin(before)
read, write = os.pipe()
if (runner := os.fork()) == 0:
    limits.limit_tasks(64)
    limits.apply_limits(8 << 30, 1 << 20)
    os.read(read, 1)
    try:
        begin(32)
    except RuntimeError:
        os._exit(1)
    os._exit(0)
begin(during)
os.write(write, b"x")
code = os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1])
over.set()
sys.exit(code)
"""


@pytest.mark.parametrize(("before", "during"), [(0, 400), (200, 0)])
def test_threads_of_other_processes_do_not_reduce_requests_thread_limit(
    before: int, during: int
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(before), str(during)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
