"""The zygote: the root of a model process, which holds the weights, forks runners and never runs user code.

It has one thread, so that no fork inherits a thread pool without its threads. Runners share the weights
copy-on-write. Another process holds weights on GPUs (see `weight_owner`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ndif.runtime.frames import FrameChannel
from ndif.runtime.messages import (
    Exited,
    Forked,
    ForkRunner,
    Load,
    LoadedModel,
    Ready,
    Signal,
    Uncache,
    Uncached,
    Verified,
)
from ndif.runtime.process.children import (
    FirstToBeKilled,
    end_with_parent,
    ended_children,
    fork,
    is_orphan,
    wake_for_children,
)
from ndif.runtime.spec import ModelSpec
from ndif.runtime.tracebacks import UserFacingError, sentence

if TYPE_CHECKING:
    from ndif.runtime.process import procfs
    from ndif.runtime.process.cuda import Cuda
    from ndif.runtime.process.forking import ForkPages, Rehearsal
    from ndif.runtime.process.isolation import Isolation
    from ndif.runtime.process.warmup_request import WarmupRequest
    from ndif.runtime.process.weight_owner import WeightOwnerClient
    from ndif.runtime.weights.weights import ModelDevices


def main(fd: int, driver: Cuda | None = None) -> None:
    """Load the model that the host names over `fd`, then fork runners until the host hangs up."""
    end_with_parent()
    control = FrameChannel(socket.socket(fileno=fd))
    if is_orphan(control.socket):  # the imports below would take seconds for nothing
        return
    # Imported while the host fetches the model's files; a fork server has already imported both.
    import torch  # noqa: F401
    import transformers  # noqa: F401

    from ndif.runtime.process.cuda import Cuda
    from ndif.runtime.weights.fetch import cached_folder, explain_unavailable, require_readable
    from ndif.runtime.weights.loading import remove_code

    order, _, _ = control.expect(Load)
    spec = order.spec
    try:
        if spec.folder is None:
            spec = replace(spec, folder=str(cached_folder(spec)))
        require_readable(spec)
        zygote = Zygote(control, spec, driver or Cuda())
    except Exception as error:
        traceback.print_exc()
        remove_code()
        is_explained = isinstance(error, UserFacingError)
        reason = sentence(error) if is_explained else explain_unavailable(spec, error)
        control.send(Signal.FAILED, reason.encode())
        return
    zygote.serve()


class Zygote:
    """The parent of every runner of one model.

    Owns the model or the weight owner, forks runners on the host's orders, and reports their exit codes.
    Runners communicate with the host directly.
    """

    def __init__(self, control: FrameChannel, spec: ModelSpec, driver: Cuda) -> None:
        import torch

        from ndif.runtime.generations import create_generation

        torch.set_num_threads(1)
        self._control = control
        self._spec = spec
        self._runners: dict[int, str] = {}
        self._weight_owner: WeightOwnerClient | None = None
        """The client of the weight owner; None if this process holds the weights."""
        self._isolation: Isolation | None = None
        self._warmup_request: WarmupRequest | None = None
        self._rehearsal: Rehearsal | None = None
        """The running rehearsal, which finds the pages that runners need."""
        self._spare = range(0)
        """Addresses that runners need not prefetch."""
        self._weights: list[procfs.Mapping] = []
        """The mappings of the weights in this process."""
        self._pages: ForkPages | None = None
        """Pages that fresh runners prefetch."""
        self._structure = b""
        """The model's structure as JSON; empty if it could not be described."""
        self._first_to_be_killed: FirstToBeKilled | None = None
        """Set if this process is confined; its forks can then not raise their own OOM score."""
        # Before any other code asks torch for devices.
        self._driver = driver if driver.uses_devices(spec) else None
        """None on CPUs."""
        self._generation = create_generation(spec.generation)
        ready = self._load() if self._driver is None else self._load_in_owner(self._driver)
        self._settle(Path(ready.model.folder))
        control.send(ready, self._structure)
        self._rehearse()

    def _settle(self, folder: Path) -> None:
        """Prepare isolation and memory for forks, and import all modules that they would import."""
        from ndif.runtime.process.heap import settle
        from ndif.runtime.process.isolation import Isolation

        untrusted, owner = self._spec.untrusted, self._weight_owner
        isolation, warmup_request = None, self._warmup_request
        if untrusted is not None:
            files = None if owner is None else owner.exported.files
            isolation = Isolation.prepare(untrusted, folder, files)
            if warmup_request is not None:
                isolation.warm_up(warmup_request)
            if untrusted.scope == "user":
                # Imported for runners that serve several requests of one key.
                from ndif.runtime.process import reset  # noqa: F401

                model, on_devices = self._generation.model, self._driver is not None
                isolation = isolation.reusable(model, on_devices=on_devices)
            else:
                isolation.decode_ahead()
        self._isolation = isolation
        # Frozen objects are not scanned by runners, whose collector would copy their pages.
        gc.collect()
        gc.freeze()
        self._spare = settle()

    def _rehearse(self) -> None:
        """Start a rehearsal to find the pages that runners need; until then, they prefetch the weights."""
        from ndif.runtime.process.forking import ForkPages, Rehearsal
        from ndif.runtime.process.warmup_request import start_threads

        isolation, warmup_request = self._isolation, self._warmup_request
        if isolation is None or warmup_request is None:
            return
        # All weights: pages that a request itself maps would count as the request's memory.
        self._pages = ForkPages().with_all_of(self._weights)
        policy = isolation.policy

        def run_as_runner() -> None:
            self._control.socket.close()
            start_threads(self._spec.threads)
            warmup_request.run(policy)

        self._rehearsal = Rehearsal(run_as_runner)

    def _record_pages(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = None
        self._pages = rehearsal.pages(but=self._spare).with_all_of(self._weights)

    def _load(self) -> Ready:
        from ndif.runtime.process.warmup_request import WarmupRequest
        from ndif.runtime.weights.huge_pages import share, shared, weights_of
        from ndif.runtime.weights.loading import read_confined
        from ndif.runtime.weights.weights import report_progress

        report_progress(self._control)
        started = time.perf_counter()
        untrusted = self._spec.untrusted
        whole = untrusted is not None and untrusted.every_request
        if whole:
            self._first_to_be_killed = FirstToBeKilled()
        model = read_confined(self._spec, self._read, whole=whole)
        load_s, loaded_at = time.perf_counter() - started, time.time()
        folder = Path(model.folder)
        share(weights_of(folder), self._control)
        self._weights = [*shared(), *weights_of(folder)]
        self._warmup_request = WarmupRequest(self._generation)
        if untrusted is None:  # else `_settle` runs it under the policy
            self._warmup_request.run()
        return Ready(model, load_s, loaded_at, exposed=False)

    def _read(self) -> LoadedModel:
        self._generation.load(self._spec)
        self._structure = self._describe()
        return self._generation.describe(self._spec)

    def _read_without_weights(self, placement: ModelDevices) -> None:
        self._generation.load_meta(self._spec, placement)
        self._structure = self._describe()

    def _describe(self) -> bytes:
        from ndif.runtime.structure import structure_or_none

        structure = structure_or_none(self._generation.model._module, self._spec.files)
        return b"" if structure is None else json.dumps(structure).encode()

    def _load_in_owner(self, driver: Cuda) -> Ready:
        """Load the weights in a weight owner, and build the model without weights here."""
        from ndif.runtime.process.weight_owner import WeightOwnerClient
        from ndif.runtime.weights.loading import folders_of_code, read_confined
        from ndif.runtime.weights.weights import check, report_progress

        # Created before the fork: owners share it, and this process removes it.
        folders_of_code(self._spec)
        self._weight_owner = WeightOwnerClient(
            self._control, self._spec, self._generation, driver, self._fork_child
        )
        owned, loaded_at = self._weight_owner.exported, time.time()
        report_progress(None)
        read_confined(self._spec, lambda: self._read_without_weights(owned.placement))
        check(self._generation.model._module, owned.weights.names)
        if early_start := driver.find_early_start():
            raise RuntimeError(early_start)
        return Ready(owned.model, owned.load_s, loaded_at, exposed=True)

    def serve(self) -> NoReturn:
        """Fork runners and report their ends until the host hangs up."""
        wake, _woken = wake_for_children()
        # An owner may have ended before the handler was installed.
        self._reap()
        while True:
            owner = self._weight_owner
            channels = [wake, self._control.socket]
            if owner is not None and owner.channel.fileno() >= 0:
                channels.append(owner.channel)
            rehearsal = self._rehearsal
            if rehearsal is not None:
                channels.append(rehearsal.socket)
            ready = wait(channels)
            # Handled first: an owner's last message must reach the host before its end ends this process.
            if owner is not None and owner.channel in ready:
                self._relay_answer(owner)
            if rehearsal is not None and rehearsal.socket in ready:
                self._record_pages(rehearsal)
            if wake in ready:
                wake.recv(4096)
                self._reap()
            if self._control.socket in ready:
                self._handle_order(owner)

    def _handle_order(self, owner: WeightOwnerClient | None) -> None:
        try:
            order, _, fds = self._control.receive()
        except (EOFError, ConnectionError):
            self._end()
        match order:
            case Signal.PING:
                self._control.send(Signal.PONG)
            case ForkRunner():
                self._fork(order.runner, fds[0], fresh=order.fresh, reused=order.reused)
            case Signal.VERIFY if owner is not None:
                owner.ask_to_verify()
            case Signal.VERIFY:
                # Without an owner, weights are copy-on-write: runners cannot change them.
                self._control.send(Verified(0))
            case Signal.CACHE | Uncache() if owner is not None:
                try:
                    self._move(owner, order)
                except Exception as error:
                    traceback.print_exc()
                    self._control.send(Signal.FAILED, sentence(error).encode())
                    self._end(1)

    def _relay_answer(self, owner: WeightOwnerClient) -> None:
        try:
            message, body = owner.answer()
        except (EOFError, OSError):
            # The owner has ended: report its exit code.
            self._reap()
            return
        self._control.send(message, body)
        if message is Signal.FAILED:
            self._end(1)

    def _move(self, owner: WeightOwnerClient, order: Signal | Uncache) -> None:
        if not isinstance(order, Uncache):
            owner.cache()
            self._control.send(Signal.CACHED)
            return
        owner.uncache(order.max_memory)
        model = owner.exported.model
        if self._isolation is not None:
            self._isolation = self._isolation.moved(Path(model.folder), owner.exported.files)
        gc.collect()
        gc.freeze()
        self._control.send(Uncached(model.device))

    def _fork(self, runner: str, fd: int, *, fresh: bool, reused: bool) -> None:
        with self._first_to_be_killed or contextlib.nullcontext():
            pid = self._fork_child(
                lambda: self._run_untrusted(fd, reused=reused) if fresh else self._run_trusted(fd)
            )
        os.close(fd)
        self._runners[pid] = runner
        self._control.send(Forked(runner, pid))

    def _fork_child(self, run: Callable[[], None]) -> int:
        """Fork a child that closes the channel to the host; return its process id."""

        def run_child() -> None:
            self._control.socket.close()
            if self._rehearsal is not None:
                self._rehearsal.socket.close()
            run()

        return fork(run_child)

    def _run_trusted(self, fd: int) -> None:
        """Run the process of a trusted runner, which serves requests in sequence."""
        from ndif.runtime.process.model_reset import ModelReset
        from ndif.runtime.process.runner import Runner
        from ndif.runtime.process.warmup_request import warm_up

        if self._weight_owner is not None:
            self._weight_owner.leave_to_parent()
            self._weight_owner.start()
        channel = FrameChannel(socket.socket(fileno=fd))
        runner = Runner(channel, self._generation, self._spec.threads, self._driver)
        warm_up(self._generation.model)
        runner.serve(ModelReset(self._generation, self._driver))

    def _run_untrusted(self, fd: int, *, reused: bool) -> None:
        """Run the process of an untrusted runner: confine it before it reads a request, then serve.

        With `reused`, it serves the requests of one key, else one request.
        """
        from ndif.runtime.process.procfs import ProcFiles
        from ndif.runtime.process.runner import Runner

        isolation, owner = self._isolation, self._weight_owner
        assert isolation is not None  # noqa: S101 - fresh runners exist only with isolation
        if self._pages is not None:
            self._pages.fetch()
        if owner is not None:
            owner.leave_to_parent()
        channel = FrameChannel(socket.socket(fileno=isolation.confinement.detach(fd)))
        proc_files = None
        if reused:
            # A confined zygote's forks cannot open clear_refs, so the host sends its descriptor.
            files = () if self._first_to_be_killed is None else channel.receive()[2]
            proc_files = ProcFiles.open(*files)
        try:
            isolation.enter(None if owner is None else lambda: self._start_driver(owner, isolation))
        except Exception as error:
            channel.send(Signal.FAILED, sentence(error).encode())
            raise
        runner = Runner(channel, self._generation, self._spec.threads, self._driver, isolation)
        if proc_files is None:
            isolation.decode_ahead()
            runner.serve_once()
        else:
            from ndif.runtime.process.reset import Reset

            runner.serve_one_user(Reset(self._generation, self._driver, isolation, proc_files))

    def _start_driver(self, owner: WeightOwnerClient, isolation: Isolation) -> None:
        """Start the driver and run a warm-up request while this runner may still open files.

        With weights on the CPU, the zygote has run the warm-up request for all its forks.
        """
        from ndif.runtime.process.warmup_request import WarmupRequest, warm_up_on_device

        owner.start()
        warm_up_on_device(self._generation.model)
        isolation.warm_up(WarmupRequest(self._generation))
        if self._driver is not None:
            self._driver.synchronize()

    def _reap(self) -> None:
        for pid, code in ended_children():
            if self._weight_owner is not None and pid == self._weight_owner.owner:
                self._weight_owner.owner = None
                print(f"the process that held the weights ended ({code})", file=sys.stderr)
                self._end(1)
            runner = self._runners.pop(pid, None)
            if runner is not None:
                self._control.send(Exited(runner, code))

    def _end(self, status: int = 0) -> NoReturn:
        from ndif.runtime.weights.loading import remove_code

        owner = None if self._weight_owner is None else self._weight_owner.owner
        for pid in [*self._runners, *([owner] if owner else [])]:
            os.kill(pid, signal.SIGKILL)
        remove_code()
        sys.stderr.flush()
        os._exit(status)
