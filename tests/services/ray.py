"""A Ray cluster for one test: each node is a raylet with separate processes, all on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.failures import retry
from tests.services.process import HOST, Process, free_port

_RAY = Path(sys.executable).with_name("ray")
_STARTED = "Ray runtime started."
_TOO_SLOW, _STARTS = "The current node timed out during startup", 5
_MEMORY = 80 << 20
"""Size of Ray's object store, which ndif does not use."""

# A dead node is detected within three seconds.
_QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Drivers of the tests have no token, whatever ~/.ray contains.
    "RAY_AUTH_MODE": "disabled",
}


class RayNode:
    """One node, with all its processes."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    def start(self) -> None:
        """Start the node; return once it has joined its cluster."""
        for left in reversed(range(_STARTS)):
            self._log.unlink(missing_ok=True)  # Ray logs there when the node has joined
            # A restarted head would mistake nodes of this machine for another head.
            (self._log.parent / "r" / "ray_current_cluster").unlink(missing_ok=True)
            try:
                self._process.start()
            except AssertionError:
                if not left or _TOO_SLOW not in self.log():
                    raise
                retry(f"Ray's node {self.name}", "Ray gives one 30 s to start")
            else:
                return

    def log(self) -> str:
        """Return the end of the log."""
        return self._process.log()

    def stop(self) -> None:
        """End the node in order; do nothing if it has ended."""
        self._end(self._process.stop)

    def kill(self) -> None:
        """End the node and all its processes like a power cut."""
        processes = self.processes()
        # First suspend all: otherwise one sees another end, and Ray's head records a partial state.
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
        self._end(self._process.kill)
        psutil.wait_procs(processes, timeout=10)

    def runs(self, module: str) -> bool:
        """Return True if a process of this module runs on the node."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    return True
        return False

    def _end(self, end: object) -> None:
        left = self.processes()
        assert callable(end)
        end()
        _, alive = psutil.wait_procs(left, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Return the node's running processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (pid := self._process.pid) is not None:
                return psutil.Process(pid).children(recursive=True)
        return []


class RayServer:
    """A head, which gets models only if it has memory, and the nodes added to it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        head: Mapping[str, str] | None = None,
        resources: Mapping[str, int] | None = None,
    ) -> None:
        """Set the cluster up. `environment` is for all nodes, `head` and `resources` for the head only."""
        # Socket names must be short, and pytest's folders are long.
        self._folder = Path(tempfile.mkdtemp(prefix="ndif-"))
        self.environment = {**_QUICK, **environment}
        self.port = free_port()
        self.address = f"{HOST}:{self.port}"
        self.head = self._node(
            "head",
            {"head": 1, **(resources or {})},
            *("--head", f"--port={self.port}", "--include-dashboard=false"),
            f"--temp-dir={self._folder / 'r'}",
            environment=head,
        )
        self._nodes = [self.head]

    @property
    def nodes(self) -> list[RayNode]:
        """The nodes added to the head."""
        return self._nodes[1:]

    def workers(self, kind: str) -> list[psutil.Process]:
        """Return the processes of actors of this class, on any node of this cluster."""
        processes = []
        for node in self._nodes:
            for process in node.processes():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if "".join(process.cmdline()[:1]).startswith(f"ray::{kind}"):
                        processes.append(process)
        return processes

    def add(
        self, name: str, resources: Mapping[str, int], environment: Mapping[str, str] | None = None
    ) -> RayNode:
        """Add a node. Nodes are added one at a time: nodes that start together take the same ports."""
        node = self._node(
            name, resources, f"--address={self.address}", environment=environment or {}
        )
        self._nodes.append(node)
        node.start()
        return node

    def _node(
        self,
        name: str,
        resources: Mapping[str, int],
        *options: str,
        environment: Mapping[str, str] | None = None,
    ) -> RayNode:
        log = self._folder / f"{name}.log"
        variables = {**self.environment, **(environment or {})}
        command = [
            *("env", *(f"{variable}={value}" for variable, value in variables.items())),
            *(str(_RAY), "start", "--block", "--disable-usage-stats", f"--node-name={name}"),
            *(f"--node-ip-address={HOST}", "--num-cpus=1", "--num-gpus=0"),
            *("--include-log-monitor=false", f"--object-store-memory={_MEMORY}"),
            f"--dashboard-agent-listen-port={free_port()}",
            f"--resources={json.dumps(resources)}",
            *options,
        ]
        process = Process(
            command, log, lambda: log.exists() and _STARTED in log.read_text(), cwd=self._folder
        )
        return RayNode(name, process, log)

    def __enter__(self) -> RayServer:
        try:
            self.head.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def worker_logs(self) -> str:
        """Return the logs of all actors of this cluster."""
        logs = sorted((self._folder / "r" / "session_latest" / "logs").glob("worker-*"))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
