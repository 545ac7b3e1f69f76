"""Servers started by their command line, and client processes of each generation."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from functools import cache
from pathlib import Path
from typing import ClassVar

from ndif.runtime.process.fork_server import OPTION
from tests.commands import NDIF, server_of_forks
from tests.fork_server import ForkedProcess, ForkServer
from tests.processes import children
from tests.serving import without_keys
from tests.waiting import PATIENCE_S

CLIENTS = Path(__file__).parent

_SCENARIO_S = 2 * PATIENCE_S
"""Bound of a scenario, in seconds: more than the bound of each wait in it."""
_LAST_WORDS_S = 10.0
"""Seconds for the output of a client that has ended: a process that it started may hold the pipe."""

CHEAP_TLS = {"SSL_CERT_FILE": str(CLIENTS / "nobody.pem")}
"""Variables that replace all certificates with a single one, whose key nobody has.

Clients read all certificates for each HTTP request, which takes 30 ms of a core, and these tests need none.
Calls by the tests themselves share a TLS context (`tests.http`)."""

STARTED_ANEW = {"PYTHONPATH": ""}
"""Variables of a server whose start or memory is measured: its processes start as in production."""


def scenarios(module: str) -> list[str]:
    """Return the names of a module's scenarios without an import: this process must not import a client."""
    tree = ast.parse((CLIENTS / f"{module}.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("scenario_")
    ]


def model_processes(server: int) -> list[int]:
    """Return the model processes that a server or its fork servers started."""
    pids = []
    for child in children(server):
        command = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if OPTION in command:
            pids += model_processes(child)
        elif "ndif.runtime" in command:
            pids.append(child)
    return pids


class LocalServer:
    """`ndif local start …`, as a user starts it."""

    command: tuple[str, ...] = ("local", "start")
    recent: ClassVar[deque[LocalServer]] = deque(maxlen=16)
    """The last servers that this process has started."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self.environment = environment
        self.output: deque[str] = deque(maxlen=500)
        self.process = self._popen(arguments)
        self.url = ""
        self.printed_at = 0.0
        """Time of the server's last line, on the monotonic clock."""
        self.recent.append(self)
        self._announced = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _popen(self, arguments: tuple[str, ...]) -> subprocess.Popen[str] | ForkedProcess:
        command = [*self.command, *arguments]
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **self.environment}
        if server_of_forks().takes(environment):
            return server_of_forks().fork(command, environment, is_short=False, one_stream=True)
        return subprocess.Popen(
            [NDIF, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip())
            self.printed_at = time.monotonic()
            if match := re.search(r"Serving at (http://\S+?)\. ", line):
                self.url = match[1]
                self._announced.set()
        self._announced.set()

    def ready(self) -> LocalServer:
        """Wait until the server serves; return it."""
        assert self._announced.wait(PATIENCE_S), "the server printed no line"
        assert self.url, "\n".join(self.output)
        return self

    def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and body of an HTTP GET."""
        try:
            with urllib.request.urlopen(self.url + path) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self, number: int = signal.SIGINT) -> int:
        """End the server with a signal, by default like Ctrl-C; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


class StartedServer(LocalServer):
    """`ndif start …`, as an operator starts it."""

    command = ("start", "-v")

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        super().__init__("--port", str(port), *arguments, environment=without_keys(environment))

    def processes(self) -> set[int]:
        """Return the ids of the server's model processes."""
        return {*model_processes(self.process.pid)}


@cache
def _client_server() -> ForkServer:
    """Return the fork server of clients in this process.

    It does not import nnsight: its version differs between clients, and it reads variables at import.
    """
    imported = (
        "torch",
        "torch.export",
        "torch._dynamo",
        "numpy",
        "sympy",
        "pydantic",
        "httpx",
        "rich",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "accelerate",
    )
    return ForkServer("worker:main", imported, CLIENTS)


class Client:
    """One generation's client process; a new process replaces one that ended or hung."""

    def __init__(self, module: str, name: str, folder: Path, environment: dict[str, str]) -> None:
        self._arguments = (module, name, str(folder))
        self._environment = {
            **os.environ,
            **CHEAP_TLS,
            "TOKENIZERS_PARALLELISM": "false",
            **environment,
        }
        self._start()

    def _start(self) -> None:
        self._process = _client_server().fork(self._arguments, self._environment)
        self._errors: deque[str] = deque(maxlen=200)
        self._reading = threading.Thread(
            target=self._read_errors, args=(self._process,), daemon=True
        )
        self._reading.start()
        assert self._answer()["ready"]

    def _read_errors(self, process: ForkedProcess) -> None:
        for line in process.stderr:
            self._errors.append(line.rstrip())

    def _answer(self) -> dict[str, object]:
        line = self._process.stdout.readline()
        if not line:
            self._reading.join(_LAST_WORDS_S)
            raise AssertionError("the client ended:\n" + "\n".join(self._errors))
        answer: dict[str, object] = json.loads(line)
        return answer

    def run(self, scenario: str) -> None:
        """Run one scenario; raise AssertionError if it fails."""
        try:
            failed = self._run(scenario)
        except AssertionError:
            self._process.wait()
            self._start()  # for later tests
            raise
        assert failed is None, f"{failed}\n--- client's output ---\n" + "\n".join(self._errors)

    def _run(self, scenario: str) -> object:
        """Return the traceback of a failed scenario, otherwise None."""
        self._process.stdin.write(scenario + "\n")
        self._process.stdin.flush()
        patience = threading.Timer(_SCENARIO_S, self._process.kill)
        patience.start()
        try:
            return self._answer()["failed"]
        finally:
            patience.cancel()

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
