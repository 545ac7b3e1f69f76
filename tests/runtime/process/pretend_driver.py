"""A stand-in for CUDA on machines without a GPU. It starts like libcuda and copies nothing.

Usage: pretend_driver.py FD FOLDER. Runs a model process whose devices are files in FOLDER. The owner and
the runners map these files. Everything else works as on GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from transformers.utils import logging

from ndif.runtime.process import zygote
from ndif.runtime.process.cuda import DeviceError, Handle, without_event
from ndif.runtime.process.procfs import peak_bytes
from ndif.runtime.spec import ModelSpec
from ndif.sandbox.confinement.confinement import DriverFiles, library_folders

CUSTODY, THREAD_NAME, EVENT, MEMORY_FILE, VARIABLES, FILES = range(1, 7)
ACTS = {
    CUSTODY: "finds the owner's channel open",
    THREAD_NAME: "names a thread through /proc",
    EVENT: "opens the file of an event",
    MEMORY_FILE: "sizes a memory file",
    VARIABLES: "reads CUDA_VISIBLE_DEVICES",
    FILES: "loads a library of its own and opens its device alone",
}
"""Actions of a driver at its start, by the fix that each one needs."""

CARD, ANOTHERS_CARD = Path("/dev/zero"), Path("/dev/full")
"""Device files that stand for the replica's GPU and for another replica's GPU."""
_A_DEVICES_REQUEST = 0x4600
"""An ioctl number of NVIDIA's driver; other devices answer ENOTTY."""
_DEADLINE_S = 0.2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.getenv.restype = ctypes.c_char_p


class PretendDriver:
    """A driver of files, with the methods of `ndif.runtime.process.cuda.Cuda`."""

    def __init__(self, folder: Path, acts: Iterable[int] = ACTS) -> None:
        self.acts = set(acts)
        self._folder = folder
        self._visible = _variable("CUDA_VISIBLE_DEVICES")
        # CUDA's event files are in /dev/shm; confined processes cannot open these either.
        self._events = folder / f"cuda.shm.{os.getpid()}.1"
        self._library = folder / "driver" / "libpretend.so"
        self._library.parent.mkdir(exist_ok=True)
        if not self._library.exists():
            shutil.copy(a_small_library(), self._library)

    def uses_devices(self, spec: ModelSpec) -> bool:
        return True

    def select(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, device="cpu", max_memory=None)

    def node_device(self, device: str) -> str:
        return device

    def find_early_start(self) -> str | None:
        return None

    def prepare_owner(self) -> None:
        self._events.touch()

    def start(self, device: str, shares: Mapping[int, int]) -> None:
        Handles.open_events = EVENT in self.acts
        failed = []
        for act, run in (
            (THREAD_NAME, name_a_thread),
            (MEMORY_FILE, size_a_memory_file),
            (VARIABLES, self._read_variables),
            (FILES, self._open_files),
        ):
            if act in self.acts:
                try:
                    run()
                except OSError as error:
                    failed.append(f"{ACTS[act]}: {error}")
        if failed:
            raise DeviceError(f"CUDA error: {'; '.join(failed)}")

    def _read_variables(self) -> None:
        # Read as a library does: Python's copy of the environment may differ.
        if _variable("CUDA_VISIBLE_DEVICES") != self._visible:
            raise OSError("the process sees other devices than its owner")

    def _open_files(self) -> None:
        ctypes.CDLL(str(self._library))
        device = os.open(CARD, os.O_RDWR)
        with contextlib.suppress(OSError):
            fcntl.ioctl(device, _A_DEVICES_REQUEST)
        os.close(device)

    def export(self, tensors: Iterable[torch.Tensor]) -> list[Handle]:
        return [without_event(self._export(tensor)) for tensor in tensors]

    def _export(self, tensor: torch.Tensor) -> Handle:
        """Move `tensor` into shared memory; on GPUs it is there from the start."""
        if (self._folder / "fatal").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        logging.tqdm(total=1).update()  # reports progress like a download
        descriptor, name = tempfile.mkstemp(suffix=".device", dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
        kind, dtype, shape, grad = type(tensor), tensor.dtype, tensor.shape, tensor.requires_grad
        tensor.data = rebuild(name, torch.Tensor, dtype, shape, False, "", False)
        return rebuild, (name, kind, dtype, shape, grad, str(self._events), True)

    def files(self, tensors: Iterable[torch.Tensor], handles: Iterable[Handle]) -> DriverFiles:
        return DriverFiles(
            libraries=tuple(str(folder) for folder in library_folders()),
            devices=(str(CARD),),
            shared_memory=tuple(arguments[0] for _, arguments in handles),
        )

    def files_to_load(self) -> DriverFiles:
        return self.files((), ())

    @contextlib.contextmanager
    def private_memory(self) -> Iterator[None]:
        yield

    def check(self, deadline_s: float) -> None:
        until = time.monotonic() + min(deadline_s, _DEADLINE_S)
        while (self._folder / "busy").exists():
            if time.monotonic() > until:
                raise DeviceError("CUDA error on GPU 0: it did nothing for a while")
            time.sleep(0.01)

    def synchronize(self) -> None:
        if (self._folder / "asserted").exists():
            raise DeviceError("CUDA error on GPU 0: device-side assert triggered")

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self, device: torch.device) -> _Past:
        return _Past()

    def release_memory(self) -> None:
        return

    def reset_peak(self) -> None:
        return

    def peak_bytes(self) -> int:
        return peak_bytes()


class Handles:
    """How this process opens handles."""

    open_events = True
    """True if a handle with an event has its event opened."""


class _Past:
    """An event that has already completed."""

    def synchronize(self) -> None:
        return


def rebuild(
    name: str,
    kind: type,
    dtype: torch.dtype,
    shape: torch.Size,
    requires_grad: bool,
    events: str,
    event_sync_required: bool,
) -> torch.Tensor:
    """The tensor in the file `name`."""
    if event_sync_required and Handles.open_events:
        os.close(os.open(events, os.O_RDWR))
    memory = torch.from_file(name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(memory, requires_grad=requires_grad)
    return memory


def name_a_thread() -> None:
    """Name a running thread of this process, with the open flags of the C library and of `fopen`."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    comm = f"/proc/self/task/{thread.native_id}/comm"
    try:
        for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            descriptor = os.open(comm, flags)
            os.write(descriptor, b"cuda-EvtHandlr")
            os.close(descriptor)
    finally:
        over.set()
        thread.join()


def size_a_memory_file() -> None:
    descriptor = os.memfd_create("pretend")
    try:
        os.ftruncate(descriptor, 1 << 20)
    finally:
        os.close(descriptor)


def a_small_library() -> Path:
    """Return the smallest library that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {Path("/", line.partition("/")[2]) for line in lines if ".so" in line}
    return min(names, key=lambda path: path.stat().st_size)


def _variable(name: str) -> str | None:
    value: bytes | None = _libc.getenv(name.encode())
    return None if value is None else value.decode()


def main(fd: int, folder: str) -> None:
    """Run a model process."""
    zygote.main(fd, PretendDriver(Path(folder)))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
