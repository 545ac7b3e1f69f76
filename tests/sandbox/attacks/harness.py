"""Servers under attack: each has its own client and runs one attack after the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import zstandard

from tests.clients.harness import CHEAP_TLS, STARTED_ANEW, LocalServer, model_processes
from tests.failures import retry
from tests.sandbox.attacks import plain
from tests.sandbox.attacks.table import ATTACKS, FAMILIES, TIME, Attack, Defence
from tests.sandbox.attacks.watch import Outcome, watching
from tests.tiny_models import make_gpt2
from tests.waiting import PATIENCE_S, time_passes, until

ROOT = Path(__file__).parents[3]
NAME = "test-org/tiny-gpt2"
RUNS_ON_S = 40.0
"""Seconds after which an endless attack counts as not stopped."""

_WITHOUT_TRACES = ("files", "network")
"""Families of attacks after which a reused runner is unchanged."""
_LAST = {attack.family: attack.name for attack in ATTACKS}
"""The last attack of each family."""

MIB = 1 << 20
EXECUTION_S = 6.0

LOW = {
    TIME: str(EXECUTION_S),
    "NDIF_RUNNER_MEMORY_BYTES": str(384 * MIB),
    "NDIF_RUNNER_MAX_THREADS": "24",
    "NDIF_MAX_RESULT_BYTES": str(8 * MIB),
    "NDIF_MAX_INLINE_RESULT_BYTES": str(1 * MIB),
    "NDIF_MAX_LOG_BYTES": "65536",
    "NDIF_MAX_LOG_LINES_PER_S": "50",
    "NDIF_MAX_STREAMED_BYTES": str(2 * MIB),
    "NDIF_MAX_REQUEST_BYTES": str(4 * MIB),
}
"""Limits that a bomb exceeds within two seconds."""
SLOW_S = 10 * EXECUTION_S
"""Time limit of a retry, in seconds, after a busy machine delayed the first try."""
ENDED_S = 2 * SLOW_S
"""Seconds within which a stopped attack must end; longer than each time limit."""

BEYOND = {
    "seconds": 3600.0,
    "memory_bytes": 640 * MIB,
    "threads": 64,
    "descriptors": 3000,
    "result_bytes": 12 * MIB,
    "log_bytes": 200_000,
    "log_lines": 3000,
    "streamed_bytes": 4 * MIB,
    "request_bytes": 32 * MIB,
    "disk_bytes": 64 * MIB,
}
"""Amounts that the bombs take: more than each limit."""


_ALWAYS = Defence.LIMIT | Defence.FRAMES | Defence.FRESH


@dataclass(frozen=True)
class Configuration:
    """One configuration of a server's defences."""

    name: str
    layers: Defence
    arguments: tuple[str, ...]
    environment: dict[str, str]
    threads: int = 1
    """Threads of a forward pass. Each runner starts its own, which takes longer than most attacks."""

    def runs(self, attack: Attack) -> bool:
        """Return True if the table claims anything for this attack in this configuration."""
        if self.name in ("none", "both"):
            return True
        return bool(attack.stopped_by & self.layers)

    def probes(self, attack: Attack) -> bool:
        """Return True if the next request is checked: once per attack, and always if state is at stake.

        In a family that leaves no traces, only the request after the last attack is checked.
        """
        if attack.family in _WITHOUT_TRACES:
            return self.name == "kernel" and attack.name == _LAST[attack.family]
        return self.name == "kernel" or bool(attack.stopped_by & _ALWAYS)


NONE = Configuration(
    "none", Defence(0), (), {"PYTHONPATH": str(Path(__file__).with_name("without_reset"))}
)
"""A trusting server: no defence, one runner for all requests that is not reset, and no low limits."""

BOTH = Configuration(
    "both", Defence.KERNEL | Defence.PROTECTOR | _ALWAYS, ("--sandbox",), LOW, threads=2
)
KERNEL = Configuration(
    "kernel", Defence.KERNEL | _ALWAYS, ("--sandbox",), {**LOW, "NDIF_PROTECTOR": "off"}
)
PROTECTOR = Configuration(
    "protector", Defence.PROTECTOR | _ALWAYS, ("--sandbox",), {**LOW, "NDIF_SANDBOX": "off"}
)
CONFIGURATIONS = (NONE, BOTH, KERNEL, PROTECTOR)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one attack on one server."""

    form: str
    reached: str | None
    """Evidence that the attack reached its aim; None if it did not."""
    outcome: Outcome
    next_request: str | None = None
    """Difference of the next request's answer; None if it was as expected."""

    @property
    def short(self) -> str:
        """Return the verdict as the text of a table's cell."""
        if self.outcome.hung:
            return "HANGS"
        if self.next_request:
            return "NEXT REQUEST"
        if self.reached:
            return "reached"
        return "error" if self.outcome.error is not None else "harmless"


class Clients:
    """A process that has imported a real client, and forks one for each server.

    An import takes six seconds of CPU, and a client that hangs is replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = str(folder / "clients.socket")
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._errors: deque[str] = deque(maxlen=100)

    def connect(self, url: str) -> _Client:
        """Return a new client of a server; the first one's server gives the model's configuration."""
        with self._lock:
            if self._process is None:
                self._start(url)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._socket)
        return _Client(connection, url, self._errors)

    def _start(self, url: str) -> None:
        worker = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, worker, NAME, self._folder, self._socket, *FAMILIES],
            env={
                **os.environ,
                **CHEAP_TLS,
                "PYTHONPATH": str(ROOT),
                "TOKENIZERS_PARALLELISM": "false",
                "NDIF_HOST": url,
                "HF_ENDPOINT": f"{url}/hub",
                "HF_HOME": str(self._folder),
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "NDIF_API_KEY": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read_errors, daemon=True).start()
        patience = threading.Timer(PATIENCE_S, self._process.kill)
        patience.start()
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        patience.cancel()
        assert ready, "\n".join(self._errors)

    def _read_errors(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())

    def close(self) -> None:
        """End the process; clients end with their sites."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class _Client:
    """One forked client, and the connection over which it gets blocks to run."""

    def __init__(self, connection: socket.socket, url: str, errors: deque[str]) -> None:
        self._connection = connection
        self._stream = connection.makefile("rw")
        self._errors = errors
        self._pid = 0
        self._write({"url": url})
        answer = self._answer(PATIENCE_S)
        assert answer is not None, "\n".join(errors)
        self._pid = answer["pid"]

    def _write(self, order: dict[str, Any]) -> None:
        self._stream.write(json.dumps(order) + "\n")
        self._stream.flush()

    def _answer(self, patience_s: float) -> dict[str, Any] | None:
        self._connection.settimeout(patience_s)
        try:
            line = self._stream.readline()
        except OSError as error:
            self.kill()
            self._errors.append(f"no answer of client {self._pid}: {error!r}")
            return None
        answer: dict[str, Any] | None = json.loads(line) if line else None
        if answer is None:
            self._errors.append(f"client {self._pid} ended")
        return answer

    def send(
        self,
        function: Callable[..., Any],
        form: str,
        targets: dict[str, Any],
        patience_s: float,
    ) -> Outcome:
        """Run a block; an outcome that is marked as hung means that this process is gone."""
        order = {
            "family": function.__module__.rpartition(".")[2],
            "name": function.__name__,
            "form": form,
            "targets": targets,
        }
        self._write(order)
        answer = self._answer(patience_s)
        if answer is None:
            return Outcome(hung=True, error="\n".join(self._errors), seconds=patience_s)
        if "failed" in answer:
            raise AssertionError(f"{order['name']} could not be sent: {answer['failed']}")
        return Outcome(answer["result"], answer["error"], answer["logs"], answer["seconds"])

    def kill(self) -> None:
        """End the process, which its parent reaps."""
        self._connection.close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Site:
    """One server, its surroundings, and a client."""

    VARIABLE = "AWS_SECRET_ACCESS_KEY"
    _MAKING = threading.Lock()
    """transformers patches torch while it makes a model, and two at a time leave it patched."""

    def __init__(self, configuration: Configuration, folder: Path, clients: Clients) -> None:
        self.configuration = configuration
        self.folder = folder
        self.secret = f"SECRET{secrets.token_hex(12)}"
        self.models, self.results, self.hf_home, self.outside = (
            folder / name for name in ("models", "results", "hf-home", "outside")
        )
        for directory in (self.models, self.results, self.hf_home, self.outside):
            directory.mkdir()
        with self._MAKING:
            make_gpt2(self.models / "served")
        if self.trusts:
            self.beyond = {**BEYOND, "seconds": EXECUTION_S + 0.5}
        else:
            self.beyond = dict(BEYOND)
        self.limit_of_disk = 16 * MIB
        self._scratch = str(folder / "tmp")
        Path(self._scratch).mkdir()
        self.server = LocalServer(
            str(self.models / "served"),
            *("--name", NAME, "--results-dir", str(self.results), "--verbose"),
            *("--threads", str(configuration.threads)),
            *configuration.arguments,
            environment={
                **STARTED_ANEW,
                **configuration.environment,
                # Output of a user's block is logged only at this level.
                "NDIF_LOG_LEVEL": "debug",
                "HF_HOME": str(self.hf_home),
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": self._scratch,
                "NDIF_RUNTIMES_DIR": str(folder / "no-runtimes"),
                self.VARIABLE: self.secret,
            },
        )
        self._clients = clients
        self._client: _Client | None = None
        self._answers: str | None = None
        self._zygote: int | None = None
        self._slow: Site | None = None

    @property
    def trusts(self) -> bool:
        """True for a server that stops nothing, where each attack must reach its aim."""
        return not self.configuration.layers

    def ready(self) -> Site:
        """Wait until the server is ready, and record a request's expected answer."""
        self.server.ready()
        answered = self.send(plain.answers, {})
        assert answered.error is None, answered.error
        self._answers = answered.result
        return self

    def close(self) -> None:
        """End the server and the client."""
        if self._client is not None:
            self._client.kill()
        self.server.stop()
        if self._slow is not None:
            self._slow.close()

    # Sending

    def send(
        self,
        function: Callable[..., Any],
        targets: dict[str, Any],
        form: str = "block",
        patience_s: float = PATIENCE_S,
    ) -> Outcome:
        """Run a function of a family as a request."""
        if self._client is None:
            self._client = self._clients.connect(self.server.url)
        outcome = self._client.send(function, form, targets, patience_s)
        if outcome.hung:
            self._client = None
        return outcome

    def post(self, payload: bytes) -> Outcome:
        """Send a raw payload, and poll for the response."""
        key = {"repo_id": NAME, "revision": None, "task": "text-generation"}
        model_key = f"nnsight.modeling.transformers.TransformersModel:{json.dumps(key)}"
        envelope = {"model_key": model_key, "session_id": "", "compress": True, "env": {}}
        started = time.perf_counter()
        compressed = payload if payload[:4] == _ZSTD else zstandard.compress(payload)
        accepted = httpx.post(
            f"{self.server.url}/request",
            files={"data": (None, json.dumps(envelope)), "blob": ("request", compressed)},
            timeout=PATIENCE_S,
        )
        if accepted.status_code != 200:
            return Outcome(error=accepted.text)
        url = f"{self.server.url}/response/{accepted.json()['id']}"
        while (seconds := time.perf_counter() - started) < PATIENCE_S:
            response = httpx.get(url).json()
            if response["status"] == "ERROR":
                return Outcome(error=response["description"], seconds=seconds)
            if response["status"] == "COMPLETED":
                return Outcome(result=json.dumps(response), seconds=seconds)
            time.sleep(0.01)
        return Outcome(hung=True, error="no end", seconds=seconds)

    def attack(self, attack: Attack, form: str = "block") -> Verdict:
        """Run one attack; repeat it once, with more time, if a busy machine may have changed it."""
        verdict = self._attack(attack, form)
        if not self._was_late(attack, verdict):
            return verdict
        retry(f"{attack.name} on {self.configuration.name}", "the machine was late")
        return (self if self.trusts else self._patient())._attack(attack, form)

    def _patient(self) -> Site:
        """Return a server like this one, whose time limit comes after every other."""
        if self._slow is None:
            folder = self.folder.with_name(f"{self.folder.name}-slow")
            folder.mkdir()
            environment = {**self.configuration.environment, TIME: str(SLOW_S)}
            configuration = replace(self.configuration, environment=environment)
            self._slow = Site(configuration, folder, self._clients).ready()
        return self._slow

    def _was_late(self, attack: Attack, verdict: Verdict) -> bool:
        """Return True if the time limit came before the expected limit, or before the aim was observed."""
        if verdict.outcome.hung:
            return False
        if self.trusts:
            return verdict.reached is None and Defence.FRAMES not in attack.stopped_by
        ended_by_time = TIME in (verdict.outcome.error or "")
        return (
            ended_by_time
            and attack.expected_error != ""
            and not _has_expected_error(attack, verdict)
        )

    def _attack(self, attack: Attack, form: str) -> Verdict:
        """Run an attack, observe it from outside, and check the answer of the next request."""
        with watching(attack.watch, self) as watch:
            if attack.is_payload:
                outcome = self.post(attack.function(**_wanted(attack, watch.targets)))
            else:
                runs_on = self.trusts and Defence.LIMIT in attack.stopped_by
                patience_s = RUNS_ON_S if runs_on else PATIENCE_S
                outcome = self.send(attack.function, watch.targets, form, patience_s)
            reached = watch.happened(outcome)
            if self.trusts:
                # Before the watch is closed, since it cannot clean up files that the runner still holds.
                if attack.family not in _WITHOUT_TRACES:
                    self._renew()
                return Verdict(form, reached, outcome)
        if not self.configuration.probes(attack):
            return Verdict(form, reached, outcome)
        answered = self.send(plain.answers, {})
        differs = answered.result != self._answers
        if not differs:
            return Verdict(form, reached, outcome)
        log = "\n".join(list(self.server.output)[-12:])
        difference = f"{answered.everything[:300]}; the server said: {log}"
        return Verdict(form, reached, outcome, difference)

    def _renew(self) -> None:
        """End the reused runner, with all state that an attack left in it."""
        if "exit code 7" in (self.send(plain.ends, {}).error or ""):
            return
        zygote, runners = self.zygote(), self.runners()
        for pid in runners:
            with contextlib.suppress(ProcessLookupError):  # the attack may have ended it by now
                os.kill(pid, signal.SIGKILL)
        until(lambda: not runners & _children(zygote))
        time_passes(0.1)

    # Observation

    def zygote(self) -> int:
        """Return the process that forks the runners."""
        if self._zygote is None or not _is_runtime(self._zygote):
            self._zygote = model_processes(self.server.process.pid)[0]
        return self._zygote

    def runners(self) -> set[int]:
        """Return the runners that the zygote forked."""
        return _children(self.zygote())

    def strays(self, token: str, began: int) -> dict[int, str]:
        """Return processes that runners started: children, orphans, and programs with `token`."""
        table = _processes()
        runners = _children(self.zygote(), table)
        commands = {}
        for pid, (parent, started) in table.items():
            if started < began:
                continue
            above = []
            while parent > 1 and parent in table:
                above.append(parent)
                parent = table[parent][0]
            command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
            if token in command or runners & set(above) or (not above and _of_site(pid, self)):
                commands[pid] = f"{pid} {command}"
        return commands

    @staticmethod
    def latest_start() -> int:
        """Return the current time in the unit of a process's start time."""
        return int(float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK"))

    @staticmethod
    def running(pid: int) -> bool:
        """Return True if a process computes."""
        return _state(pid) == "R"

    def holds(self) -> dict[str, int]:
        """Return the server process's peak memory, open descriptors and disk space, in bytes or numbers."""
        process = Path(f"/proc/{self.server.process.pid}")
        status = (process / "status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
        files = [file for root in (self.results, Path(self._scratch)) for file in root.rglob("*")]
        return {
            "peak": peak,
            "descriptors": len(list((process / "fd").iterdir())),
            "disk": sum(_blocks(file) for file in files) + self._unlinked(process),
        }

    def _unlinked(self, process: Path) -> int:
        """Return the bytes of open files that were deleted."""
        total = 0
        for descriptor in (process / "fd").iterdir():
            try:
                if str(descriptor.readlink()).startswith(str(self.folder)):
                    status = descriptor.stat()
                    total += status.st_blocks * 512 if status.st_nlink == 0 else 0
            except OSError:
                continue
        return total


_ZSTD = b"\x28\xb5\x2f\xfd"


def _has_expected_error(attack: Attack, verdict: Verdict) -> bool:
    return re.search(attack.expected_error, verdict.outcome.error or "", re.DOTALL) is not None


def _wanted(attack: Attack, targets: dict[str, Any]) -> dict[str, Any]:
    names = attack.function.__code__.co_varnames[: attack.function.__code__.co_argcount]
    return {name: targets[name] for name in names}


def _blocks(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512 if file.is_file() else 0
    except OSError:
        return 0


def _processes() -> dict[int, tuple[int, int]]:
    """Return the parent and the start time of every process that has not ended."""
    parents = {}
    # Called every 30 ms during many attacks: plain strings, as `Path` takes three times as long.
    for name in os.listdir("/proc"):  # noqa: PTH208 - see above
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(b") ")[2].split()
            if fields and fields[0] not in b"ZX":
                parents[int(name)] = int(fields[1]), int(fields[19])
    return parents


def _read(path: str) -> bytes:
    """Return the content of a file of /proc; nothing if the process has ended."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - see `_processes`
            return file.read()
    except OSError:
        return b""


def _children(pid: int, table: dict[int, tuple[int, int]] | None = None) -> set[int]:
    # Not /proc/PID/task/TID/children, which may omit processes while others end.
    processes = _processes() if table is None else table
    return {child for child, (parent, _) in processes.items() if parent == pid}


def _state(pid: int) -> str:
    return _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1].decode()


def _is_runtime(pid: int) -> bool:
    return b"ndif.runtime" in _read(f"/proc/{pid}/cmdline")


def _of_site(pid: int, site: Site) -> bool:
    """Return True if an orphan has this server's environment, or a runner's, which is empty."""
    if not _is_runtime(pid):
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return not environment.strip(b"\0") or site.secret.encode() in environment


# Judging

SERVER_PATHS = (str(ROOT / "src"), "site-packages", str(Path(re.__file__).parents[1]))
"""Parts of the server's paths, which no error may show to a user."""
_CRASHED = "The process that ran your block"


def faults(attack: Attack, configuration: Configuration, verdict: Verdict) -> list[str]:
    """Return the differences between a verdict and the table's claims."""
    outcome = verdict.outcome
    problems = []
    if outcome.hung and configuration is NONE and Defence.LIMIT in attack.stopped_by:
        return []  # without a limit it runs on, which is its aim
    if outcome.hung:
        return [f"it did not end within {outcome.seconds:g} s: {outcome.error}"]
    if configuration is NONE:
        if Defence.FRAMES in attack.stopped_by:
            if not re.search(attack.expected_error, outcome.error or "", re.DOTALL):
                problems.append(
                    f"proves nothing: it did not get as far as {attack.expected_error!r}: {outcome}"
                )
        elif verdict.reached is None:
            problems.append(f"proves nothing: it fails where nothing stops it: {outcome}")
        return problems
    if verdict.reached is not None:
        problems.append(f"not stopped ({verdict.form}): {verdict.reached}")
    if verdict.next_request is not None:
        problems.append(f"the next request is answered otherwise: {verdict.next_request}")
    text = outcome.error or ""
    if shown := [path for path in SERVER_PATHS if path in text]:
        problems.append(f"the error shows {shown}: {text[-300:]}")
    if (
        configuration is KERNEL
        and attack.expected_error
        and not re.search(attack.expected_error, text, re.DOTALL)
    ):
        problems.append(f"its error does not say {attack.expected_error!r}: {text[-300:]!r}")
    if configuration is PROTECTOR and Defence.PROTECTOR in attack.stopped_by:
        # Errors in `__del__` cannot be raised; they are logged.
        if outcome.error is None and not outcome.logs and not attack.is_tamed:
            problems.append(f"no error says that it is forbidden: {outcome}")
        elif _CRASHED in text:
            problems.append(f"it ended in a crash: {text[-300:]!r}")
    if configuration is BOTH and outcome.seconds > ENDED_S:
        problems.append(f"it took {outcome.seconds:.1f} s")
    return problems


# Everything

Results = dict[tuple[str, str], list[Verdict]]


def run(attacks: Iterable[Attack], configurations: Iterable[Configuration]) -> Results:
    """Run attacks on servers of every configuration in parallel; return the verdicts by name and server."""
    results: Results = {}
    attacks = list(attacks)
    folder = Path(tempfile.mkdtemp(prefix="ndif-attacks-"))
    # Readable by all: a runner without privileges must be confined by more than file modes.
    folder.chmod(0o755)
    failures: list[BaseException] = []

    clients = Clients(folder)

    def run_site(configuration: Configuration) -> None:
        (folder / configuration.name).mkdir()
        site = Site(configuration, folder / configuration.name, clients)
        try:
            site.ready()
            for attack in filter(configuration.runs, attacks):
                forms = attack.forms if configuration is PROTECTOR else attack.forms[:1]
                verdicts = [site.attack(attack, form) for form in forms]
                results[attack.name, configuration.name] = verdicts
        except BaseException as error:
            log = "\n".join(list(site.server.output)[-15:])
            failures.append(
                AssertionError(f"{configuration.name}: {error!r}; its server said:\n{log}")
            )
            raise
        finally:
            site.close()

    threads = [
        threading.Thread(target=run_site, args=(configuration,)) for configuration in configurations
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clients.close()
    shutil.rmtree(folder, ignore_errors=True)
    if failures:
        raise failures[0]
    return results
