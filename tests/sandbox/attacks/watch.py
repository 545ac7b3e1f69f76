"""Observation from outside of whether an attack reached its aim, without asking the attacked server."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.waiting import PATIENCE_S, time_passes, until

if TYPE_CHECKING:
    from tests.sandbox.attacks.harness import Site

SETTLE_S = 2.0
"""Seconds after which a fault on the trusting server counts as lasting."""
SEEN_S = 10.0
"""Seconds within which the evidence of an attack that nothing stops appears."""
RUNNERS = 2
"""Runners that wait for requests of untrusted users (`NDIF_RUNNER_POOL`)."""


@dataclass
class Outcome:
    """The response to one request."""

    result: str | None = None
    error: str | None = None
    logs: str = ""
    """Logs and streams."""
    seconds: float = 0.0
    hung: bool = False

    @property
    def everything(self) -> str:
        """Return all text that the user received."""
        return "\n".join(filter(None, [self.result, self.error, self.logs]))


class Watch(Protocol):
    """One aim under watch, from before an attack until after it."""

    targets: dict[str, Any]
    """Arguments of the attack, by the names of its parameters."""

    def happened(self, outcome: Outcome) -> str | None:
        """Return the evidence that the aim was reached; None if it was not."""
        ...

    def close(self) -> None:
        """Clean up the watched objects."""
        ...


# Files


class SecretStays:
    """A secret that must not come back in any way."""

    def __init__(self, site: Site) -> None:
        self.secret = f"SECRET{secrets.token_hex(12)}"
        self._folder = Path(tempfile.mkdtemp(prefix="secrets-", dir=site.outside))
        file = self._folder / "notes"
        file.write_text(self.secret)
        file.chmod(0o644)
        listed = self._folder / "listed"
        listed.mkdir()
        (listed / self.secret).touch()
        self.targets = {
            "secret_file": str(file),
            "secret_folder": str(listed),
            "scratch": str(self._folder),
        }

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return "the secret came back" if self.secret in outcome.everything else None

    def close(self) -> None:
        """See `Watch`."""


class TensorStays(SecretStays):
    """A secret in torch and numpy files."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        import numpy
        import torch

        torch.save({"secret": self.secret}, self._folder / "secret.pt")
        numpy.save(self._folder / "secret.npy", numpy.frombuffer(self.secret.encode(), "u1"))
        self.targets |= {
            "secret_tensors": str(self._folder / "secret.pt"),
            "secret_array": str(self._folder / "secret.npy"),
        }


class LoadableSecretStays(SecretStays):
    """A secret in a folder of code that a library runs, and in a tokenizer that one loads."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        code = self._folder / "custom_generate"
        code.mkdir()
        (code / "generate.py").write_text(
            f"def generate(model, **options):\n    raise ValueError({self.secret!r})\n"
        )
        tokenizer = json.loads((site.models / "served" / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[self.secret] = len(vocabulary)
        (self._folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        self.targets |= {
            "code_folder": str(self._folder),
            "secret_tokenizer": str(self._folder / "tokenizer.json"),
        }


class SystemFileStays(SecretStays):
    """A system file with restricted access."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        file = next(f for f in ("/etc/shadow", "/etc/passwd") if os.access(f, os.R_OK))
        self.secret = Path(file).read_text().splitlines()[0]
        self.targets = {"secret_file": file}


class PlacedSecretStays(SecretStays):
    """A secret in one of the server's files: its token, another model, another user's result."""

    where = ""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._file = getattr(site, self.where) / f"of-others-{secrets.token_hex(4)}"
        self._file.write_text(self.secret)
        self.targets["secret_file"] = str(self._file)

    def close(self) -> None:
        """See `Watch`."""
        self._file.unlink(missing_ok=True)


class TokenStays(PlacedSecretStays):
    """The folder of the Hugging Face token."""

    where = "hf_home"


class OtherModelStays(PlacedSecretStays):
    """The folder of another model."""

    where = "models"


class ResultStays(PlacedSecretStays):
    """The folder of all users' results."""

    where = "results"


class EnvironmentStays:
    """A secret in the environment that the server was started with."""

    def __init__(self, site: Site) -> None:
        self.secret = site.secret
        self.targets: dict[str, Any] = {
            "variable": site.VARIABLE,
            "server_pid": site.server.process.pid,
            "server_address": _environment_address(site.server.process.pid),
            "zygote_pid": site.zygote(),
        }

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return "the server's secret came back" if self.secret in outcome.everything else None

    def close(self) -> None:
        """See `Watch`."""


@dataclass(frozen=True)
class _State:
    content: bytes | None
    mode: int
    owner: tuple[int, int]
    times: tuple[int, int]
    attributes: tuple[str, ...]


class FilesStay:
    """A file and a folder in which nothing may change: content, names, mode, owner, times, attributes."""

    def __init__(self, site: Site) -> None:
        self._folder = self._make(site)
        # File modes permit writing, so only the confinement protects the files.
        self._folder.chmod(0o777)
        (self._folder / "canary").write_text("sings")
        (self._folder / "canary").chmod(0o666)
        (self._folder / "empty").mkdir(mode=0o777)
        self._before = self._state()
        self.targets: dict[str, Any] = {
            "canary_file": str(self._folder / "canary"),
            "canary_folder": str(self._folder),
            "empty_folder": str(self._folder / "empty"),
        }

    def _make(self, site: Site) -> Path:
        return Path(tempfile.mkdtemp(prefix="canary-", dir=site.outside))

    def _state(self) -> dict[str, _State]:
        if not self._folder.exists():
            return {}
        states = {}
        for file in [self._folder, *sorted(self._folder.rglob("*"))]:
            status = file.lstat()
            states[str(file)] = _State(
                file.read_bytes() if file.is_file() else None,
                status.st_mode,
                (status.st_uid, status.st_gid),
                # A folder's times change with its names. Access times are ignored.
                (0, 0) if file.is_dir() else (status.st_mtime_ns, status.st_nlink),
                tuple(os.listxattr(file, follow_symlinks=False)),
            )
        return states

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        after = self._state()
        changed = [name for name, was in self._before.items() if after.get(name) != was]
        new = [name for name in after if name not in self._before]
        return f"changed: {changed}, new: {new}" if changed or new else None

    def close(self) -> None:
        """See `Watch`."""


class ModelFilesStay(FilesStay):
    """The same, within the folder of the model that is served."""

    def _make(self, site: Site) -> Path:
        return Path(tempfile.mkdtemp(prefix="canary-", dir=site.models / "served"))


class SharedMemoryStays(FilesStay):
    """The same, in the system's shared memory."""

    def _make(self, site: Site) -> Path:
        return Path(tempfile.mkdtemp(prefix="canary-", dir="/dev/shm"))

    def close(self) -> None:
        """See `Watch`."""
        import shutil

        shutil.rmtree(self._folder, ignore_errors=True)


class LogStays:
    """The server's own output, into which no user may write."""

    def __init__(self, site: Site) -> None:
        self._token = f"FORGED{secrets.token_hex(8)}"
        self._site = site
        self.targets: dict[str, Any] = {"token": self._token}

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return _evidence(self._site, self._forged, 0.1)

    def _forged(self) -> str | None:
        lines = [line for line in [*self._site.server.output] if self._token in line]
        return f"the server said {lines[0]!r}" if lines else None

    def close(self) -> None:
        """See `Watch`."""


# The network


class Silence:
    """Listeners of every kind, which must hear nothing."""

    def __init__(self, site: Site) -> None:
        self._site = site
        folder = tempfile.mkdtemp(prefix="listening-", dir=site.outside)
        token = secrets.token_hex(6)
        self._sockets = {
            "tcp": socket.create_server(("127.0.0.1", 0)),
            "tcp6": socket.create_server(("::1", 0), family=socket.AF_INET6),
            "udp": _bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "udp6": _bound(socket.AF_INET6, socket.SOCK_DGRAM, ("::1", 0)),
            "unix": _bound(socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/socket"),
            "unix datagrams": _bound(socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagrams"),
            "abstract": _bound(socket.AF_UNIX, socket.SOCK_STREAM, f"\0ndif-{token}"),
            "abstract datagrams": _bound(
                socket.AF_UNIX, socket.SOCK_DGRAM, f"\0ndif-{token}-dgram"
            ),
        }
        Path(folder).chmod(0o777)
        self._heard: list[str] = []
        self._selector = selectors.DefaultSelector()
        for kind, listening in self._sockets.items():
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, kind)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.targets: dict[str, Any] = {
            "tcp_port": self._sockets["tcp"].getsockname()[1],
            "tcp6_port": self._sockets["tcp6"].getsockname()[1],
            "udp_port": self._sockets["udp"].getsockname()[1],
            "udp6_port": self._sockets["udp6"].getsockname()[1],
            "unix_path": f"{folder}/socket",
            "unix_datagrams": f"{folder}/datagrams",
            "abstract_name": f"ndif-{token}",
            "secret_file": str(Path(folder) / "secret"),
        }

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return _evidence(
            self._site, lambda: f"received by {self._heard}" if self._heard else None, 0.05
        )

    def _listen(self) -> None:
        """Record connections; close them at once, so that they do not wait for an answer."""
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.02):
                listening = self._sockets[key.data]
                self._heard.append(key.data)
                with contextlib.suppress(BlockingIOError):
                    if listening.type == socket.SOCK_DGRAM:
                        listening.recv(100)
                    else:
                        listening.accept()[0].close()

    def close(self) -> None:
        """See `Watch`."""
        self._ended.set()
        self._thread.join()
        self._selector.close()
        for listening in self._sockets.values():
            listening.close()


def _bound(family: int, kind: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind)
    listener.bind(address)
    if family == socket.AF_UNIX and not address.startswith("\0"):
        Path(address).chmod(0o777)
    if kind == socket.SOCK_STREAM:
        listener.listen(8)
    return listener


class ServerNotCalled:
    """The server itself, which must accept nothing from its own runners."""

    def __init__(self, site: Site) -> None:
        self.targets: dict[str, Any] = {"server_url": site.server.url}

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return "the server answered its runner" if "pong" in (outcome.result or "") else None

    def close(self) -> None:
        """See `Watch`."""


# Processes


class VictimUnharmed:
    """A process of another user, which must stay alive, running and unchanged."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.secret = f"SECRET{secrets.token_hex(12)}"
        self._process = subprocess.Popen(
            ["sleep", "600"],
            env={"SECRET": self.secret},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
        )
        self._pid = pid = self._process.pid
        while self._starting():
            time.sleep(0.001)
        self._before = self._state()
        self.targets: dict[str, Any] = {
            "victim_pid": pid,
            "victim_address": _environment_address(pid),
        }

    def _starting(self) -> bool:
        """Return True until the program sleeps: while it loads, it opens files."""
        process = Path(f"/proc/{self._pid}")
        state = (process / "stat").read_text().rpartition(") ")[2][0]
        loaded = (process / "comm").read_text() == "sleep\n" and state == "S"
        return not loaded or len(list((process / "fd").iterdir())) != 3

    def _state(self) -> dict[str, Any]:
        process = Path(f"/proc/{self._pid}")
        status = dict(
            line.split(":\t", 1) for line in (process / "status").read_text().splitlines()
        )
        fields = (process / "stat").read_text().rpartition(") ")[2].split()
        return {
            "stopped": fields[0] in "TtZX",
            "traced by": status["TracerPid"],
            "environment": (process / "environ").read_bytes(),
            "nice": fields[16],
            "policy": fields[38],
            "affinity": os.sched_getaffinity(self._pid),
            "limits": (process / "limits").read_text(),
            "killed first": (process / "oom_score_adj").read_text(),
            "io": ctypes.CDLL(None).syscall(252, 1, self._pid),
            "descriptors": sorted(descriptor.name for descriptor in (process / "fd").iterdir()),
            "user": status["Uid"],
        }

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return _evidence(self._site, lambda: self._harmed(outcome), 0.02)

    def _harmed(self, outcome: Outcome) -> str | None:
        if (code := self._process.poll()) is not None:
            return f"the victim ended ({code})"
        after = self._state()
        if changed := [name for name, was in self._before.items() if after[name] != was]:
            return f"the victim's {changed} changed"
        return "the victim's secret came back" if self.secret in outcome.everything else None

    def close(self) -> None:
        """See `Watch`."""
        if self._process.poll() is None:
            os.kill(self._pid, signal.SIGCONT)
            self._process.kill()
        self._process.wait(PATIENCE_S)


def _environment_address(pid: int) -> int:
    """Return the address of a process's environment."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[47])


class NoProcess:
    """A runner must not start a process: no child, no other program, no orphan."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._token = f"4242.{secrets.randbelow(10**9):09d}"
        self._seen: dict[int, str] = {}
        self._ended = threading.Event()
        self._began = site.latest_start()
        self.targets: dict[str, Any] = {"token": self._token, "empty_folder": str(site.outside)}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._seen |= self._site.strays(self._token, self._began)
            time.sleep(0.03)

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return _evidence(self._site, self._strayed, 0.05)

    def _strayed(self) -> str | None:
        self._seen |= self._site.strays(self._token, self._began)
        return f"processes: {list(self._seen.values())[:3]}" if self._seen else None

    def close(self) -> None:
        """See `Watch`."""
        self._ended.set()
        self._thread.join()
        for pid in self._site.strays(self._token, self._began):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class NobodySurvives:
    """The process of a request must end with it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        # New runners replace ended ones.
        self._before = until(self._settled)
        self.targets: dict[str, Any] = dict(site.beyond)

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return _lasting(self._site, self._survivors)

    def _settled(self) -> set[int]:
        before = self._site.runners()
        time_passes(0.3)
        return before if self._site.runners() == before else set()

    def _survivors(self) -> str | None:
        now = self._site.runners()
        # On a busy machine, a replacement may start only now.
        busy = max(len(self._before), 0 if self._site.trusts else RUNNERS)
        if len(now) <= busy and not self._hot(now):
            return None
        return f"{len(now)} runners live where {busy} did, busy: {self._hot(now)}"

    def _hot(self, pids: set[int]) -> list[int]:
        """Return the earlier processes that still compute."""
        return [pid for pid in pids & self._before if self._site.running(pid)]

    def close(self) -> None:
        """See `Watch`."""


# Kernel objects of other processes


class KernelObjects:
    """Shared memory, semaphores and messages of another user."""

    KEY = 0x6E646966

    def __init__(self, site: Site) -> None:
        self.secret = f"SECRET{secrets.token_hex(12)}"
        self._libc = libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        key = self.KEY + secrets.randbelow(1 << 24)
        flags = 0o1000 | 0o666  # IPC_CREAT
        self._memory = libc.shmget(key, 4096, flags)
        self._semaphore = libc.semget(key, 1, flags)
        self._queue = libc.msgget(key, flags)
        assert min(self._memory, self._semaphore, self._queue) >= 0
        text = self.secret.encode()
        address = ctypes.c_void_p(libc.shmat(self._memory, None, 0))
        ctypes.memmove(address, text, len(text))
        libc.shmdt(address)
        message = ctypes.create_string_buffer((1).to_bytes(8, "little") + text)
        assert libc.msgsnd(self._queue, message, len(text), 0) == 0
        name = secrets.token_hex(6)
        self._shared = Path(f"/dev/shm/{name}")
        self._shared.write_text(self.secret)
        self._shared.chmod(0o666)
        self._name = f"/{name}"
        librt = ctypes.CDLL("librt.so.1")
        self._posix = librt.mq_open(self._name.encode(), 0o102, 0o666, None)  # O_RDWR | O_CREAT
        assert self._posix >= 0
        assert librt.mq_send(self._posix, text, len(text), 0) == 0
        self._librt = librt
        self.targets: dict[str, Any] = {"key": key, "object_name": name}

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        if self.secret in outcome.everything:
            return "the secret came back"
        value = self._libc.semctl(self._semaphore, 0, 12)  # GETVAL
        if value != 0:
            return f"the semaphore is {value}"
        return None

    def close(self) -> None:
        """See `Watch`."""
        self._libc.shmctl(self._memory, 0, None)  # IPC_RMID
        self._libc.semctl(self._semaphore, 0, 0)
        self._libc.msgctl(self._queue, 0, None)
        self._shared.unlink(missing_ok=True)
        self._librt.mq_close(self._posix)
        self._librt.mq_unlink(self._name.encode())


# Calls and limits


class NotServed:
    """A system call that must be refused, in a harmless form that returns "REACHED" if it succeeds."""

    def __init__(self, site: Site) -> None:
        self.targets: dict[str, Any] = {
            "zygote_pid": site.zygote(),
            "server_pid": site.server.process.pid,
            "results_folder": str(site.results),
            "disk": _disk(),
            "model_folder": str(site.models / "served"),
            "missing": str(site.outside / "not-there"),
            "secret_file": str(site.outside / "something"),
        }
        (site.outside / "something").write_text("something")

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        # Errors are ignored: they show the source line, which contains the word.
        text = outcome.result or ""
        return text[:100] if "REACHED" in text else None

    def close(self) -> None:
        """See `Watch`."""


def _disk() -> str:
    """Return a block device that this process can open, or /dev/kmsg."""
    for device in sorted(Path("/sys/block").iterdir()):
        if os.access(f"/dev/{device.name}", os.R_OK):
            return f"/dev/{device.name}"
    return "/dev/kmsg"


class LimitHolds:
    """A limit of a request: a block that returns "SURVIVED" exceeded it."""

    def __init__(self, site: Site) -> None:
        self.targets: dict[str, Any] = dict(site.beyond)

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        last = (outcome.error or "").rstrip().rpartition("\n")[2]
        text = f"{outcome.result or ''}{last}"
        return "it took more than its limit" if "SURVIVED" in text else None

    def close(self) -> None:
        """See `Watch`."""


class ResultHolds(LimitHolds):
    """The size limit of results: any returned result was too large."""

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return None if outcome.result is None else "it was returned"


class PayloadUnread(LimitHolds):
    """A payload that must not be unpickled; an unpickled value causes an unpacking error."""

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        error = outcome.error or ""
        return (
            f"it was read: {error[:200]}"
            if "to unpack" in error or "cannot unpack" in error
            else None
        )


class ServerUnharmed:
    """The server's memory, descriptors and disk stay unchanged; forged messages end as an ERROR."""

    _MEMORY = 48 << 20

    def __init__(self, site: Site) -> None:
        self._site = site
        self._before = site.holds()
        self.targets: dict[str, Any] = dict(site.beyond)

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        if wrong := _lasting(self._site, self._grown):
            return wrong
        if "FORGED" in (outcome.result or ""):
            return "what was forged was taken for true"
        return None

    def _grown(self) -> str | None:
        now, before = self._site.holds(), self._before
        if now["peak"] > before["peak"] + self._MEMORY:
            return f"the server's memory grew to {now['peak']:,} from {before['peak']:,} bytes"
        if now["descriptors"] > before["descriptors"] + 2:
            return f"the server has {now['descriptors']} descriptors, not {before['descriptors']}"
        if now["disk"] > before["disk"] + (1 << 20):
            return f"{now['disk'] - before['disk']:,} bytes were left on disk"
        return None

    def close(self) -> None:
        """See `Watch`."""


class DiskStays:
    """The disk, on which a result may use no more than its limit."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._most = self._first = site.holds()["disk"]
        self._limit = site.limit_of_disk
        self._ended = threading.Event()
        self.targets: dict[str, Any] = dict(site.beyond)
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.is_set():
            self._most = max(self._most, self._site.holds()["disk"])
            time.sleep(0.02)

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        self._ended.set()
        self._thread.join()
        used = self._most - self._first
        return f"{used:,} bytes were written" if used > self._limit else None

    def close(self) -> None:
        """See `Watch`."""
        self._ended.set()


# The next request


class NextRequest:
    """Another request must get the same answer before and after."""

    def __init__(self, site: Site, probe: Callable[..., Any]) -> None:
        self._site = site
        self._probe = probe
        self._before = self._look()
        self.targets: dict[str, Any] = {"empty_folder": str(site.outside)}

    def _look(self) -> tuple[str | None, str | None]:
        outcome = self._site.send(self._probe, {})
        return outcome.result, outcome.error

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        after = self._look()
        return None if after == self._before else f"{self._before} became {after}"[:300]

    def close(self) -> None:
        """See `Watch`."""


def next_request(probe: Callable[..., Any]) -> Callable[[Site], NextRequest]:
    """Return a watch on the answer of `probe` in separate requests."""
    return lambda site: NextRequest(site, probe)


class EarlierSecret:
    """A secret that an earlier request of another user left behind."""

    def __init__(self, site: Site, leave: Callable[..., Any]) -> None:
        self.secret = f"SECRET{secrets.token_hex(12)}"
        folder = Path(tempfile.mkdtemp(prefix="left-", dir=site.outside))
        folder.chmod(0o777)
        self.targets: dict[str, Any] = {"left_folder": str(folder)}
        site.send(leave, {"secret": self.secret, **self.targets})

    def happened(self, outcome: Outcome) -> str | None:
        """See `Watch`."""
        return "another user's secret came back" if self.secret in outcome.everything else None

    def close(self) -> None:
        """See `Watch`."""


def earlier_secret(leave: Callable[..., Any]) -> Callable[[Site], EarlierSecret]:
    """Return a watch on the secret that another user's request `leave` left behind."""
    return lambda site: EarlierSecret(site, leave)


def _evidence(site: Site, look: Callable[[], str | None], seconds: float) -> str | None:
    """Return the evidence of an attack's success, which may appear shortly after its answer."""
    if not site.trusts:
        time_passes(seconds)
        return look()
    for _ in range(round(SEEN_S / 0.05)):
        if value := look():
            return value
        time.sleep(0.05)
    return None


def _lasting(site: Site, look: Callable[[], str | None]) -> str | None:
    """Return a fault that persists; wait for its end, longer on a server that stops the attack."""
    for _ in range(round((SETTLE_S if site.trusts else PATIENCE_S) / 0.05)):
        if (wrong := look()) is None:
            return None
        time.sleep(0.05)
    return wrong


@contextlib.contextmanager
def watching(make: Callable[[Site], Watch], site: Site) -> Iterator[Watch]:
    """Yield a watch, and close it at the end."""
    watch = make(site)
    try:
        yield watch
    finally:
        watch.close()
