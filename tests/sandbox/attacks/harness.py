"""Servers under attack, each with a client of its own, and one attack after the other."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import zstandard

from tests.clients.harness import CHEAP_TLS, LocalServer
from tests.sandbox.attacks import plain
from tests.sandbox.attacks.table import FAMILIES, TIME, Attack, Layer
from tests.sandbox.attacks.watch import Outcome, watching
from tests.tiny_models import make_gpt2

ROOT = Path(__file__).parents[3]
NAME = "test-org/tiny-gpt2"
PATIENCE_S = 40.0
"""An attack that has not ended by then hangs."""

_LEAVE_NOTHING = ("files", "network")
"""Families after which a runner that is kept is as before."""

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
"""Limits that a bomb passes in a second or two."""

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
"""What the bombs take: more than each limit."""


_ALWAYS = Layer.LIMIT | Layer.FRAMES | Layer.FRESH


@dataclass(frozen=True)
class Configuration:
    """One way to run a server."""

    name: str
    layers: Layer
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def runs(self, attack: Attack) -> bool:
        """Whether the table claims anything for this attack here."""
        if self.name in ("none", "both"):
            return True
        return bool(attack.stopped_by & self.layers)

    def probes(self, attack: Attack) -> bool:
        """Whether the request after it is looked at: each once, and where state is at stake always."""
        return self.name == "kernel" or bool(attack.stopped_by & _ALWAYS)


NONE = Configuration("none", Layer(0), (), {})
"""It trusts its user: no layer, one runner for all requests, and no low limits."""

BOTH = Configuration("both", Layer.KERNEL | Layer.PROTECTOR | _ALWAYS, ("--sandbox",), LOW)
KERNEL = Configuration(
    "kernel", Layer.KERNEL | _ALWAYS, ("--sandbox",), {**LOW, "NDIF_PROTECTOR": "off"}
)
PROTECTOR = Configuration(
    "protector", Layer.PROTECTOR | _ALWAYS, ("--sandbox",), {**LOW, "NDIF_SANDBOX": "off"}
)
CONFIGURATIONS = (NONE, BOTH, KERNEL, PROTECTOR)


@dataclass(frozen=True)
class Verdict:
    """How one attack went on one server."""

    form: str
    reached: str | None
    """The evidence that it reached its aim; None if it did not."""
    outcome: Outcome
    next_request: str | None = None
    """How the request after it differed; None if it did not."""

    @property
    def short(self) -> str:
        """In a table's cell."""
        if self.outcome.hung:
            return "HANGS"
        if self.next_request:
            return "NEXT REQUEST"
        if self.reached:
            return "reached"
        return "error" if self.outcome.error is not None else "harmless"


class _Client:
    """The worker process."""

    def __init__(self, site: Site) -> None:
        folder = Path(tempfile.mkdtemp(prefix="client-", dir=site.folder))
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("worker.py"), NAME, folder, *FAMILIES],
            env={
                **os.environ,
                **CHEAP_TLS,
                "PYTHONPATH": str(ROOT),
                "TOKENIZERS_PARALLELISM": "false",
                "NDIF_HOST": site.server.url,
                "HF_ENDPOINT": f"{site.server.url}/hub",
                "HF_HOME": str(folder),
                "NDIF_API_KEY": "",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._errors: deque[str] = deque(maxlen=100)
        threading.Thread(target=self._read_errors, daemon=True).start()
        assert self._answer(60) is not None, "\n".join(self._errors)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())

    def _answer(self, patience_s: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        patience = threading.Timer(patience_s, self._process.kill)
        patience.start()
        try:
            line = self._process.stdout.readline()
        finally:
            patience.cancel()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def send(self, function: Callable[..., Any], form: str, targets: dict[str, Any]) -> Outcome:
        """Run a block; an outcome that says it hung means that this process is gone."""
        assert self._process.stdin is not None
        order = {
            "family": function.__module__.rpartition(".")[2],
            "name": function.__name__,
            "form": form,
            "targets": targets,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._answer(PATIENCE_S)
        if answer is None:
            self._process.wait()
            return Outcome(hung=True, error="\n".join(self._errors), seconds=PATIENCE_S)
        if "failed" in answer:
            raise AssertionError(f"{order['name']} could not be sent: {answer['failed']}")
        return Outcome(answer["result"], answer["error"], answer["heard"], answer["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


class Site:
    """One server, its surroundings, and a client."""

    VARIABLE = "AWS_SECRET_ACCESS_KEY"

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        self.configuration = configuration
        self.folder = folder
        self.secret = f"SECRET{secrets.token_hex(12)}"
        self.models, self.results, self.hf_home, self.outside = (
            folder / name for name in ("models", "results", "hf-home", "outside")
        )
        for each in (self.models, self.results, self.hf_home, self.outside):
            each.mkdir()
        make_gpt2(self.models / "served")
        trusts = not configuration.layers
        self.beyond = {**BEYOND, "seconds": EXECUTION_S + 0.5 if trusts else BEYOND["seconds"]}
        self.limit_of_disk = 16 * MIB
        self._scratch = str(folder / "tmp")
        Path(self._scratch).mkdir()
        self.server = LocalServer(
            str(self.models / "served"),
            *("--name", NAME, "--results-dir", str(self.results), "--verbose"),
            *("--threads", "2"),
            *configuration.arguments,
            environment={
                **configuration.environment,
                "HF_HOME": str(self.hf_home),
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": self._scratch,
                "NDIF_RUNTIMES_DIR": str(folder / "no-runtimes"),
                self.VARIABLE: self.secret,
            },
        )
        self._client: _Client | None = None
        self._answers: str | None = None

    def ready(self) -> Site:
        """Wait until it serves, and know what it answers."""
        self.server.ready()
        answered = self.send(plain.answers, {})
        assert answered.error is None, answered.error
        self._answers = answered.result
        return self

    def close(self) -> None:
        """End the server and the client."""
        if self._client is not None:
            self._client.close()
        self.server.stop()

    # Sending

    def send(
        self, function: Callable[..., Any], targets: dict[str, Any], form: str = "block"
    ) -> Outcome:
        """Run a function of a family as a request."""
        if self._client is None:
            self._client = _Client(self)
        outcome = self._client.send(function, form, targets)
        if outcome.hung:
            self._client = None
        return outcome

    def post(self, payload: bytes) -> Outcome:
        """Send a payload as it is, and poll for what becomes of it."""
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
        """Run one attack; once more where that may be different on a machine with less other work."""
        verdict = self._attack(attack, form)
        return self._attack(attack, form) if self._was_late(attack, verdict) else verdict

    def _was_late(self, attack: Attack, verdict: Verdict) -> bool:
        """Whether time ended what another limit should have, or was over before anybody had looked."""
        if verdict.outcome.hung:
            return False
        if not self.configuration.layers:
            return verdict.reached is None and Layer.FRAMES not in attack.stopped_by
        ended_by_time = TIME in (verdict.outcome.error or "")
        return ended_by_time and attack.says != "" and not _said(attack, verdict)

    def _attack(self, attack: Attack, form: str) -> Verdict:
        """Run it, look from outside, and see that the next request is answered as ever."""
        trusts = not self.configuration.layers
        with watching(attack.watch, self) as watch:
            if attack.is_payload:
                outcome = self.post(attack.function(**_wanted(attack, watch.targets)))
            else:
                outcome = self.send(attack.function, watch.targets, form)
            reached = watch.happened(outcome)
            if trusts:
                # Before the watch is closed: what this runner holds on to cannot be cleaned up.
                if attack.family not in _LEAVE_NOTHING:
                    self._renew()
                return Verdict(form, reached, outcome)
        if not self.configuration.probes(attack):
            return Verdict(form, reached, outcome)
        answered = self.send(plain.answers, {})
        differs = answered.result != self._answers
        if not differs:
            return Verdict(form, reached, outcome)
        said = "\n".join(list(self.server.output)[-12:])
        told = f"{answered.everything[:300]}; the server said: {said}"
        return Verdict(form, reached, outcome, told)

    def _renew(self) -> None:
        """End the runner that is kept, and whatever an attack made of it."""
        if "exit code 7" in (self.send(plain.ends, {}).error or ""):
            return
        zygote, runners = self.zygote(), self.runners()
        for pid in runners:
            os.kill(pid, signal.SIGKILL)
        while runners & set(_children(zygote)):
            time.sleep(0.01)
        time.sleep(0.1)

    # Looking

    def zygote(self) -> int:
        """The process that forks the runners."""
        return next(pid for pid in _children(self.server.process.pid) if _is_runtime(pid))

    def runners(self) -> set[int]:
        """The processes that it forked."""
        return set(_children(self.zygote()))

    def strays(self, token: str, began: int) -> dict[int, str]:
        """Processes that came out of runners: their children, orphans, programs with `token`."""
        table = _processes()
        runners = self.runners()
        found = {}
        for pid, (parent, started, command) in table.items():
            if started < began:
                continue
            above = []
            while parent > 1 and parent in table:
                above.append(parent)
                parent = table[parent][0]
            if token in command or runners & set(above) or (not above and _of_site(pid, self)):
                found[pid] = f"{pid} {command}"
        return found

    @staticmethod
    def latest_start() -> int:
        """The time now, in the unit in which processes say when they started."""
        return int(float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK"))

    @staticmethod
    def running(pid: int) -> bool:
        """Whether a process computes."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "R"
        except OSError:
            return False

    def holds(self) -> dict[str, int]:
        """What the server's process takes."""
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
        """Bytes of files that have no name but are open."""
        total = 0
        for each in (process / "fd").iterdir():
            try:
                if str(each.readlink()).startswith(str(self.folder)):
                    status = each.stat()
                    total += status.st_blocks * 512 if status.st_nlink == 0 else 0
            except OSError:
                continue
        return total


_ZSTD = b"\x28\xb5\x2f\xfd"


def _said(attack: Attack, verdict: Verdict) -> bool:
    return re.search(attack.says, verdict.outcome.error or "", re.DOTALL) is not None


def _wanted(attack: Attack, targets: dict[str, Any]) -> dict[str, Any]:
    names = attack.function.__code__.co_varnames[: attack.function.__code__.co_argcount]
    return {name: targets[name] for name in names}


def _blocks(file: Path) -> int:
    try:
        return file.lstat().st_blocks * 512 if file.is_file() else 0
    except OSError:
        return 0


def _processes() -> dict[int, tuple[int, int, str]]:
    """Every process: its parent, when it started, its command."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
        if fields[0] not in "ZX":
            found[int(folder.name)] = int(fields[1]), int(fields[19]), command
    return found


def _children(pid: int) -> list[int]:
    return [each for each, (parent, _, _) in _processes().items() if parent == pid]


def _is_runtime(pid: int) -> bool:
    try:
        return b"ndif.runtime" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _of_site(pid: int, site: Site) -> bool:
    """Whether an orphan came from this server: it has its environment, or a runner's, which is empty."""
    if not _is_runtime(pid):
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return not environment.strip(b"\0") or site.secret.encode() in environment


# Everything

Results = dict[tuple[str, str], list[Verdict]]


def run(attacks: Iterable[Attack], configurations: Iterable[Configuration]) -> Results:
    """Run attacks on servers of every configuration at the same time; the verdicts by name and server."""
    results: Results = {}
    attacks = list(attacks)
    folder = Path(tempfile.mkdtemp(prefix="ndif-attacks-"))
    # Whoever lost every privilege still has to be kept from what is open to all.
    folder.chmod(0o755)
    failures: list[BaseException] = []

    def one_site(configuration: Configuration) -> None:
        (folder / configuration.name).mkdir()
        site = Site(configuration, folder / configuration.name)
        try:
            site.ready()
            for attack in filter(configuration.runs, attacks):
                forms = attack.forms if configuration is PROTECTOR else attack.forms[:1]
                verdicts = [site.attack(attack, form) for form in forms]
                results[attack.name, configuration.name] = verdicts
        except BaseException as error:
            said = "\n".join(list(site.server.output)[-15:])
            failures.append(
                AssertionError(f"{configuration.name}: {error!r}; its server said:\n{said}")
            )
            raise
        finally:
            site.close()

    threads = [
        threading.Thread(target=one_site, args=(configuration,)) for configuration in configurations
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(folder, ignore_errors=True)
    if failures:
        raise failures[0]
    return results
