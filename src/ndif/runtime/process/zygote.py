"""The model process: holds the weights, forks runners, never runs user code.

It has one thread for as long as it lives, so that a fork finds no pool that lost its threads, and its
runners share the weights copy-on-write. Weights on GPUs are not here but in an owner (see `owner`).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ndif.runtime.frames import Channel
from ndif.runtime.spec import ModelSpec, by_index
from ndif.runtime.tracebacks import sentence

if TYPE_CHECKING:
    from ndif.runtime.custody import Custody
    from ndif.runtime.driver import Driver
    from ndif.runtime.forking import Pages
    from ndif.runtime.rehearsal import Rehearsal
    from ndif.runtime.stranger import Stranger

_PR_SET_PDEATHSIG = 1


def main(fd: int, driver: Driver | None = None) -> None:
    """Load what the host asks for, then fork runners until it hangs up.

    Args:
        fd: Descriptor of the host's channel.
        driver: The driver of this machine's GPUs; NVIDIA's by default.
    """
    end_with_parent()
    control = Channel(socket.socket(fileno=fd))
    # While the host has the model's files fetched.
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from ndif.runtime.cuda import Cuda

    header, _, _ = control.receive()
    spec = ModelSpec.of(header["spec"])
    try:
        zygote = Zygote(control, spec, driver or Cuda())
    except Exception as error:
        traceback.print_exc()
        control.send({"kind": "failed"}, sentence(error).encode())
        return
    zygote.serve()


def end_with_parent() -> None:
    """Have this process not outlive the one that started it, whatever it is doing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Zygote:
    """The parent of every runner of one model."""

    def __init__(self, control: Channel, spec: ModelSpec, driver: Driver) -> None:
        import torch

        from ndif.runtime.generations import adapter

        torch.set_num_threads(1)
        self._control = control
        self._spec = spec
        self._runners: dict[int, str] = {}
        self._custody: Custody | None = None
        """Who has the weights, where this process has none."""
        self._stranger: Stranger | None = None
        self._rehearsal: Rehearsal | None = None
        self._pages: Pages | None = None
        # First, because what comes next may ask torch for its devices.
        on_devices = driver.wanted(spec)
        self._driver = driver if on_devices else None
        """None on CPUs."""
        self._generation = adapter(spec.generation)
        ready = self._load_in_owner(driver) if on_devices else self._load()
        if spec.untrusted is not None:
            from ndif.runtime.stranger import Stranger

            folder = Path(ready["model"]["folder"])
            files = None if self._custody is None else self._custody.owned.files
            self._stranger = Stranger.prepare(spec.untrusted, folder, files, self._rehearsal)
        self._settle()
        control.send({"kind": "ready", "exposed": self._custody is not None, **ready})

    @property
    def _reuses(self) -> bool:
        """Return True if a confined runner serves one key's requests in a row."""
        untrusted = self._spec.untrusted
        if untrusted is None:
            return False
        return untrusted.scope == "user" or (
            untrusted.scope == "auto" and self._custody is not None
        )

    def _settle(self) -> None:
        """Arrange this process's memory for the forks to come, with what each of them would import."""
        from ndif.runtime import proc_files, reset, runner  # noqa: F401
        from ndif.runtime.forking import Pages
        from ndif.runtime.heap import settle
        from ndif.runtime.huge import shared

        if self._reuses and self._stranger is not None:
            self._stranger = self._stranger.reusable()
        # What is here now stays: runners neither scan it nor copy its pages by counting references.
        gc.collect()
        gc.freeze()
        settle()
        stranger, rehearsal = self._stranger, self._rehearsal
        if stranger is not None and rehearsal is not None:
            self._pages = Pages.used_by(lambda: rehearsal.as_a_runner(stranger.policy))
            # All of the weights: what a request is the first to read would count as what it takes.
            for mapping in shared():
                self._pages.read.extend((mapping.start, mapping.size))

    def _load(self) -> dict[str, Any]:
        from ndif.runtime import progress
        from ndif.runtime.huge import share, weights_of
        from ndif.runtime.rehearsal import Rehearsal

        progress.report(
            lambda done, total: self._control.send(
                {"kind": "progress", "done": done, "total": total}
            )
        )
        started = time.perf_counter()
        self._generation.load(self._spec)
        loaded, loaded_at = time.perf_counter(), time.time()
        model = describe(self._generation.model, self._spec)
        share(weights_of(Path(model["folder"])), self._control)
        self._rehearsal = Rehearsal(self._generation, self._spec)
        self._rehearsal.run()
        return {
            "model": model,
            "load_s": loaded - started,
            "loaded_at": loaded_at,
        }

    def _load_in_owner(self, driver: Driver) -> dict[str, Any]:
        """Have another process load the weights, and build here what they will be put into."""
        from ndif.runtime import progress
        from ndif.runtime.custody import Custody
        from ndif.runtime.weights import check

        self._custody = Custody(self._control, self._spec, self._generation, driver, self._be_child)
        owned, loaded_at = self._custody.owned, time.time()
        progress.report(lambda *_: None)
        self._generation.load_meta(self._spec, owned.placement)
        check(self._generation.model._module, owned.weights.names)
        if reached := driver.reached():
            raise RuntimeError(reached)
        return {"model": owned.model, "load_s": owned.load_s, "loaded_at": loaded_at}

    def serve(self) -> None:
        """Fork on request, report who ended, leave with the host."""
        wake, woken = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control.socket, selectors.EVENT_READ, self._obey)
            selector.register(wake, selectors.EVENT_READ, self._reap)
            if self._custody is not None:
                selector.register(self._custody.channel, selectors.EVENT_READ, self._pass_on)
            # An owner may have ended before its end would have been noticed.
            self._reap()
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                    key.data()
                self._follow_owner(selector)

    def _follow_owner(self, selector: selectors.BaseSelector) -> None:
        """Listen to the owner there is now, if there is one."""
        custody = self._custody
        if custody is None:
            return
        for key in list(selector.get_map().values()):
            if key.data == self._pass_on and key.fileobj is not custody.channel:
                selector.unregister(key.fileobj)
        if custody.channel.fileno() >= 0 and custody.channel not in selector.get_map():
            selector.register(custody.channel, selectors.EVENT_READ, self._pass_on)

    def _obey(self) -> None:
        """Do the next thing that the host wants; end with it."""
        try:
            header, _, fds = self._control.receive()
        except (EOFError, ConnectionError):
            self._end()
        custody = self._custody
        match header["kind"]:
            case "fork":
                self._fork(header["runner"], fds[0], fresh=header["fresh"], reused=header["reused"])
            case "verify" if custody is not None:
                custody.ask_to_verify()
            case "verify":
                # Without an owner, what a runner writes to is its own copy.
                self._control.send({"kind": "verified", "restored": 0})
            case "cache" if custody is not None:
                self._move(custody.cache)
                self._control.send({"kind": "cached"})
            case "uncache" if custody is not None:
                self._move(lambda: self._uncache(custody, by_index(header["max_memory"])))
                self._control.send({"kind": "uncached", "model": custody.owned.model})

    def _pass_on(self) -> None:
        """Tell the host what the owner answers."""
        assert self._custody is not None  # noqa: S101 - whose channel this is
        try:
            header, body = self._custody.answer()
        except (EOFError, OSError):
            # Its exit code says more, and comes at once.
            self._reap()
            return
        self._control.send(header, body)
        if header["kind"] == "failed":
            self._end(1)

    def _move(self, move: Callable[[], None]) -> None:
        """Move the weights; this process ends if they cannot be moved."""
        try:
            move()
        except Exception as error:
            traceback.print_exc()
            self._control.send({"kind": "failed"}, sentence(error).encode())
            self._end(1)

    def _uncache(self, custody: Custody, max_memory: Mapping[int, int] | None) -> None:
        """Have cached weights on devices."""
        custody.uncache(max_memory)
        if self._stranger is not None and self._spec.untrusted is not None:
            folder, files = Path(custody.owned.model["folder"]), custody.owned.files
            self._stranger = self._stranger.moved(self._spec.untrusted, folder, files)
        gc.collect()
        gc.freeze()

    def _fork(self, runner: str, fd: int, *, fresh: bool, reused: bool) -> None:
        pid = os.fork()
        if pid == 0:
            self._be_child(
                lambda: self._run_fresh(fd, reused=reused) if fresh else self._run_kept(fd)
            )
        os.close(fd)
        self._runners[pid] = runner
        self._control.send({"kind": "forked", "runner": runner, "pid": pid})

    def _be_child(self, run: Callable[[], None]) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent()
            self._control.socket.close()
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _run_kept(self, fd: int) -> None:
        """Be a runner that serves on."""
        from ndif.runtime.runner import Runner

        if self._custody is not None:
            self._custody.leave_to_parent()
            self._custody.start()
        channel = Channel(socket.socket(fileno=fd))
        runner = Runner(channel, self._generation, self._spec.threads, self._driver)
        runner.warm_up()
        runner.serve()

    def _run_fresh(self, fd: int, *, reused: bool) -> None:
        """Be a runner of one request, or one key's, confined before it reads a byte of it."""
        from ndif.runtime.proc_files import ProcFiles
        from ndif.runtime.reset import Reset
        from ndif.runtime.runner import Runner

        stranger, custody = self._stranger, self._custody
        assert stranger is not None  # noqa: S101 - the host asks for one only where it said so
        if self._pages is not None:
            self._pages.fetch()
        if custody is not None:
            custody.leave_to_parent()
        channel = Channel(socket.socket(fileno=stranger.confinement.isolate(fd)))
        proc_files = ProcFiles.open() if reused else None
        try:
            stranger.enter(
                None if custody is None else lambda: self._start_driver(custody, stranger)
            )
        except Exception as error:
            channel.send({"kind": "failed"}, sentence(error).encode())
            raise
        runner = Runner(channel, self._generation, self._spec.threads, self._driver, stranger)
        # Elsewhere a pass of its own costs a runner of one request as much as it would save.
        if self._pages is None and custody is None:
            runner.warm_up()
        if proc_files is None:
            runner.serve_once()
        else:
            runner.serve_one_user(
                Reset(self._generation, channel, self._driver, stranger, proc_files)
            )

    def _start_driver(self, custody: Custody, stranger: Stranger) -> None:
        """Start the driver and run a request, as long as this runner may open what that takes.

        Where the weights are on the CPU the zygote has run one, for all its forks.
        """
        from ndif.runtime.rehearsal import Rehearsal
        from ndif.runtime.warming import warm_up_on_device

        custody.start()
        warm_up_on_device(self._generation.model)
        stranger.rehearse(Rehearsal(self._generation, self._spec))
        if self._driver is not None:
            self._driver.synchronize()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._custody is not None and pid == self._custody.owner:
                self._custody.owner = None
                print(f"the process that held the weights ended ({code})", file=sys.stderr)
                self._end(1)
            runner = self._runners.pop(pid, None)
            if runner is not None:
                self._control.send({"kind": "exited", "runner": runner, "code": code})

    def _end(self, status: int = 0) -> NoReturn:
        owner = None if self._custody is None else self._custody.owner
        for pid in [*self._runners, *([owner] if owner else [])]:
            os.kill(pid, signal.SIGKILL)
        sys.stderr.flush()
        os._exit(status)


def describe(model: Any, spec: ModelSpec) -> dict[str, Any]:
    """What the host may tell others about the loaded model."""
    from transformers.utils import cached_file

    config = cached_file(spec.checkpoint, "config.json", revision=spec.revision)
    module = model._module
    return {
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "dtype": str(module.dtype).removeprefix("torch."),
        "device": str(module.device),
        "task": getattr(model, "task", None),
        "folder": str(Path(config).parent),
        "repo_id": canonical_name(model, spec),
    }


def canonical_name(model: Any, spec: ModelSpec) -> str | None:
    """The name that clients' keys carry: a hub knows "gpt2" as "openai-community/gpt2".

    None for a folder, whose name the operator gives, and where no hub answers.
    """
    if spec.is_folder:
        return None
    try:
        name: str = json.loads(model._remoteable_model_key())["repo_id"]
    except Exception:
        return None
    return name
