"""The model process: holds the weights, forks runners, never runs user code.

The process keeps to one thread, so that no fork inherits a pool without its threads. Runners share the
weights copy-on-write. Weights on GPUs are held by another process (see `weight_owner`).
"""

from __future__ import annotations

import ctypes
import gc
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
    from ndif.runtime.process.driver import Driver
    from ndif.runtime.process.forking import Pages
    from ndif.runtime.process.isolation import Isolation
    from ndif.runtime.process.warmup_request import WarmupRequest
    from ndif.runtime.process.weight_owner_client import WeightOwnerClient

_PR_SET_PDEATHSIG = 1


def main(fd: int, driver: Driver | None = None) -> None:
    """Load what the host asks for, then fork runners until it hangs up.

    Args:
        fd: Descriptor of the host's channel.
        driver: The driver of this machine's GPUs; NVIDIA's by default.
    """
    end_with_parent()
    control = Channel(socket.socket(fileno=fd))
    # While the host fetches the model's files; a fork server has imported both.
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from ndif.runtime.process.cuda import Cuda

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
    """Make the kernel end this process when the process that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Zygote:
    """The parent of every runner of one model.

    Owns the model (or its owner process, on GPUs), forks a runner for each request of the host, and reports
    how runners ended. Runners talk to the host themselves.
    """

    def __init__(self, control: Channel, spec: ModelSpec, driver: Driver) -> None:
        import torch

        from ndif.runtime.generations import create_generation

        torch.set_num_threads(1)
        self._control = control
        self._spec = spec
        self._runners: dict[int, str] = {}
        self._weight_owner: WeightOwnerClient | None = None
        """The process that holds the weights; None where this process does."""
        self._isolation: Isolation | None = None
        self._warmup_request: WarmupRequest | None = None
        self._pages: Pages | None = None
        # Before anything else asks torch for its devices.
        on_devices = driver.uses_devices(spec)
        self._driver = driver if on_devices else None
        """None on CPUs."""
        self._generation = create_generation(spec.generation)
        ready = self._load_in_owner(driver) if on_devices else self._load()
        if spec.untrusted is not None:
            from ndif.runtime.process.isolation import Isolation

            folder = Path(ready["model"]["folder"])
            files = None if self._weight_owner is None else self._weight_owner.exported.files
            self._isolation = Isolation.prepare(spec.untrusted, folder, files, self._warmup_request)
        self._settle()
        control.send({"kind": "ready", "exposed": self._weight_owner is not None, **ready})

    @property
    def _reuses(self) -> bool:
        """Return True if a confined runner serves one key's requests in a row."""
        untrusted = self._spec.untrusted
        if untrusted is None:
            return False
        return untrusted.scope == "user" or (
            untrusted.scope == "auto" and self._weight_owner is not None
        )

    def _settle(self) -> None:
        """Arrange this process's memory for its forks, with all that each of them would import."""
        from ndif.runtime.process.forking import Pages
        from ndif.runtime.process.heap import settle
        from ndif.runtime.weights.huge_pages import shared

        if self._reuses and self._isolation is not None:
            self._isolation = self._isolation.reusable()
        # Runners neither scan these objects nor copy their pages by counting references.
        gc.collect()
        gc.freeze()
        settle()
        isolation, warmup_request = self._isolation, self._warmup_request
        if isolation is not None and warmup_request is not None:
            self._pages = Pages.used_by(lambda: warmup_request.run_as_runner(isolation.policy))
            # All of the weights: pages that a request reads first would count as the request's memory.
            for mapping in shared():
                self._pages.read.extend((mapping.start, mapping.size))

    def _load(self) -> dict[str, Any]:
        from ndif.runtime.process.loaded_model import describe
        from ndif.runtime.process.warmup_request import WarmupRequest
        from ndif.runtime.weights.huge_pages import share, weights_of
        from ndif.runtime.weights.weights import report_progress

        report_progress(
            lambda done, total: self._control.send(
                {"kind": "progress", "done": done, "total": total}
            )
        )
        started = time.perf_counter()
        self._generation.load(self._spec)
        loaded, loaded_at = time.perf_counter(), time.time()
        model = describe(self._generation.model, self._spec)
        share(weights_of(Path(model["folder"])), self._control)
        self._warmup_request = WarmupRequest(self._generation, self._spec)
        self._warmup_request.run()
        return {
            "model": model,
            "load_s": loaded - started,
            "loaded_at": loaded_at,
        }

    def _load_in_owner(self, driver: Driver) -> dict[str, Any]:
        """Load the weights in another process, and build the model without them here."""
        from ndif.runtime.process.weight_owner_client import WeightOwnerClient
        from ndif.runtime.weights.weights import check, report_progress

        self._weight_owner = WeightOwnerClient(
            self._control, self._spec, self._generation, driver, self._be_child
        )
        owned, loaded_at = self._weight_owner.exported, time.time()
        report_progress(lambda *_: None)
        self._generation.load_meta(self._spec, owned.placement)
        check(self._generation.model._module, owned.weights.names)
        if reached := driver.find_early_start():
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
            if self._weight_owner is not None:
                selector.register(self._weight_owner.channel, selectors.EVENT_READ, self._pass_on)
            # An owner may have ended before the handler was there.
            self._reap()
            while True:
                for key, _ in selector.select():
                    if key.fileobj is wake:
                        wake.recv(4096)
                    key.data()
                self._follow_owner(selector)

    def _follow_owner(self, selector: selectors.BaseSelector) -> None:
        """Listen to the present owner, if there is one."""
        weight_owner = self._weight_owner
        if weight_owner is None:
            return
        for key in list(selector.get_map().values()):
            if key.data == self._pass_on and key.fileobj is not weight_owner.channel:
                selector.unregister(key.fileobj)
        if weight_owner.channel.fileno() >= 0 and weight_owner.channel not in selector.get_map():
            selector.register(weight_owner.channel, selectors.EVENT_READ, self._pass_on)

    def _obey(self) -> None:
        """Carry out the host's next request; end with the host."""
        try:
            header, _, fds = self._control.receive()
        except (EOFError, ConnectionError):
            self._end()
        weight_owner = self._weight_owner
        match header["kind"]:
            case "fork":
                self._fork(header["runner"], fds[0], fresh=header["fresh"], reused=header["reused"])
            case "verify" if weight_owner is not None:
                weight_owner.ask_to_verify()
            case "verify":
                # Without an owner, a runner writes to its own copy.
                self._control.send({"kind": "verified", "restored": 0})
            case "cache" if weight_owner is not None:
                self._move(weight_owner.cache)
                self._control.send({"kind": "cached"})
            case "uncache" if weight_owner is not None:
                self._move(lambda: self._uncache(weight_owner, by_index(header["max_memory"])))
                self._control.send({"kind": "uncached", "model": weight_owner.exported.model})

    def _pass_on(self) -> None:
        """Pass the owner's answer on to the host."""
        assert self._weight_owner is not None  # noqa: S101 - whose channel this is
        try:
            header, body = self._weight_owner.answer()
        except (EOFError, OSError):
            # The exit code says more, and comes at once.
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

    def _uncache(
        self, weight_owner: WeightOwnerClient, max_memory: Mapping[int, int] | None
    ) -> None:
        """Move cached weights to devices."""
        weight_owner.uncache(max_memory)
        if self._isolation is not None and self._spec.untrusted is not None:
            folder, files = Path(weight_owner.exported.model["folder"]), weight_owner.exported.files
            self._isolation = self._isolation.moved(self._spec.untrusted, folder, files)
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
        """Be a runner that serves one request after the other."""
        from ndif.runtime.process.runner import Runner

        if self._weight_owner is not None:
            self._weight_owner.leave_to_parent()
            self._weight_owner.start()
        channel = Channel(socket.socket(fileno=fd))
        runner = Runner(channel, self._generation, self._spec.threads, self._driver)
        runner.warm_up()
        runner.serve()

    def _run_fresh(self, fd: int, *, reused: bool) -> None:
        """Be a runner of one request, or one key's, confined before it reads a byte."""
        from ndif.runtime.process.proc_files import ProcFiles
        from ndif.runtime.process.reset import Reset
        from ndif.runtime.process.runner import Runner

        isolation, weight_owner = self._isolation, self._weight_owner
        assert isolation is not None  # noqa: S101 - only specs with it have fresh runners
        if self._pages is not None:
            self._pages.fetch()
        if weight_owner is not None:
            weight_owner.leave_to_parent()
        channel = Channel(socket.socket(fileno=isolation.confinement.detach(fd)))
        proc_files = ProcFiles.open() if reused else None
        try:
            isolation.enter(
                None
                if weight_owner is None
                else lambda: self._start_driver(weight_owner, isolation)
            )
        except Exception as error:
            channel.send({"kind": "failed"}, sentence(error).encode())
            raise
        runner = Runner(channel, self._generation, self._spec.threads, self._driver, isolation)
        # Elsewhere warming up costs a runner of one request as much as it would save.
        if self._pages is None and weight_owner is None:
            runner.warm_up()
        if proc_files is None:
            runner.serve_once()
        else:
            runner.serve_one_user(
                Reset(self._generation, channel, self._driver, isolation, proc_files)
            )

    def _start_driver(self, weight_owner: WeightOwnerClient, isolation: Isolation) -> None:
        """Start the driver and run a request, as long as this runner may open what that takes.

        Where the weights are on the CPU, the zygote has run one for all its forks.
        """
        from ndif.runtime.process.warmup_request import WarmupRequest, warm_up_on_device

        weight_owner.start()
        warm_up_on_device(self._generation.model)
        isolation.warm_up(WarmupRequest(self._generation, self._spec))
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
            if self._weight_owner is not None and pid == self._weight_owner.owner:
                self._weight_owner.owner = None
                print(f"the process that held the weights ended ({code})", file=sys.stderr)
                self._end(1)
            runner = self._runners.pop(pid, None)
            if runner is not None:
                self._control.send({"kind": "exited", "runner": runner, "code": code})

    def _end(self, status: int = 0) -> NoReturn:
        owner = None if self._weight_owner is None else self._weight_owner.owner
        for pid in [*self._runners, *([owner] if owner else [])]:
            os.kill(pid, signal.SIGKILL)
        sys.stderr.flush()
        os._exit(status)
