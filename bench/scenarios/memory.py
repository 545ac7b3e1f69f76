"""Memory of a default `ndif start` on one machine: of each process, of results and of weights.

A process's memory is its proportional set size (PSS): a shared page counts in part for each process. The
memory that a waiting runner adds is the decrease of all processes' memory after its end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import psutil

from bench.figures import MB, Figure
from bench.scenario import Site
from bench.servers.machine import Machine, machine
from bench.servers.processes import NAME, Watch, held_weights, proportional
from bench.traces import sample
from ndif.runtime.process.fork_server import OPTION

_USERS = tuple(f"user-{number}" for number in range(4))
_SETTLED_S = 3.0
_RESULT_MB = 256
_SERVER, _FORK_SERVER, _MODEL = "gateway and leader", "fork server", "model process"
_WAITING, _OWN = "waiting runner", "user's waiting runner"


def measure(site: Site) -> Iterator[Figure]:
    """Measure a server without another one beside it: pages that both map would count in part."""
    with machine({NAME: site.folder}, site.environment) as host:
        time.sleep(_SETTLED_S)
        for role, processes in roles(host.pid).items():
            yield _pss(role, processes)
        yield _added(host, _WAITING)
        # Afterwards each user has its own runner, which is stopped until the next job.
        ways = {user: {"url": host.url, "key": host.keys[user]} for user in _USERS}
        sample("small", host.url, ways, rounds=1, warm_up=0)
        time.sleep(_SETTLED_S)
        yield _pss(_OWN, roles(host.pid)[_OWN])
        yield _added(host, _OWN)
        for generation in ("0.8", "0.7"):
            yield _copies(host, generation)
        held = held_weights(host.pid, (site.folder / "model.safetensors").stat().st_size)
        how = "of the two generations' processes together, which should share one"
        yield Figure("copies of the weights", held, 1.1, "x", how=how)


def roles(pid: int) -> dict[str, list[psutil.Process]]:
    """Return the processes of a server by role."""
    processes: dict[str, list[psutil.Process]] = defaultdict(list)
    processes[_SERVER].append(psutil.Process(pid))
    for server in processes[_SERVER][0].children():
        if OPTION in server.cmdline():
            processes[_FORK_SERVER].append(server)
            for model in server.children():
                processes[_MODEL].append(model)
                for runner in model.children():
                    is_stopped = runner.status() == psutil.STATUS_STOPPED
                    processes[_OWN if is_stopped else _WAITING].append(runner)
    return processes


def _pss(role: str, processes: Iterable[psutil.Process]) -> Figure:
    sizes = [process.memory_full_info().pss / MB for process in processes]
    return Figure.of(f"memory of a {role}", sizes, None, "MB", how=f"PSS; {len(sizes)} processes")


def _added(host: Machine, role: str) -> Figure:
    """Kill the runners of a role, one after the other; the server replaces them on demand."""
    added = []
    for runner in roles(host.pid)[role]:
        before = proportional(host.pid)
        runner.kill()
        while runner.is_running():  # its parent reaps it
            time.sleep(0.01)
        added.append((before - proportional(host.pid)) / MB)
    how = f"PSS of all processes, with and without; {len(added)} runners"
    return Figure.of(f"a {role} adds", added, 40, "MB", how=how)


def _copies(host: Machine, generation: str) -> Figure:
    ways = {"sandboxed": {"url": host.url, "key": host.key}}
    # The first trace loads the model for a generation without a replica.
    sample("small", host.url, ways, generation=generation, rounds=1, warm_up=0)
    watch = Watch(host.pid)
    try:
        sample(f"large-{_RESULT_MB}", host.url, ways, generation=generation, rounds=1, warm_up=0)
    finally:
        growth = watch.stop()
    name = f"copies of a {_RESULT_MB} MB result in one process, {generation}"
    how = "largest growth of a process's own memory; the values themselves are one copy"
    return Figure(name, growth / (_RESULT_MB * MB), 2.0, "x", how=how)
