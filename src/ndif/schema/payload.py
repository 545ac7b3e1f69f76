"""A request's payload: bytes in memory, or a file of this machine where it is large."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from shutil import copyfile
from tempfile import mkstemp

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of what is compressed, a payload or a result."""
MAX_IN_MEMORY = 1 << 20
"""Largest payload, in bytes, that is kept in memory."""
_HEAD = 16


class PayloadFile:
    """A payload in a file, which no process holds in memory or open while it waits.

    `create` begins one, `append` fills it. Its file is deleted by `discard`, or with the object.
    """

    def __init__(self, path: Path) -> None:
        """Describe the file at `path`, which belongs to somebody else."""
        self.path = path
        self._size = path.stat().st_size
        self._head = b""
        self._delete: weakref.finalize[..., PayloadFile] | None = None

    @classmethod
    def create(cls, folder: Path, prefix: str = "") -> PayloadFile:
        """Return an empty file of its own in `folder`."""
        descriptor, path = mkstemp(prefix=prefix, dir=folder)
        os.close(descriptor)
        file = cls(Path(path))
        file._delete = weakref.finalize(file, Path(path).unlink, missing_ok=True)
        return file

    def __len__(self) -> int:
        return self._size

    def startswith(self, prefix: bytes) -> bool:
        """Return True if the content begins with these few bytes."""
        return self._head.startswith(prefix)

    def append(self, *pieces: Buffer) -> None:
        """Write at the end of the file."""
        # Without O_CREAT: a file that was discarded meanwhile stays so.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for piece in pieces:
                left = memoryview(piece)
                self._head += bytes(left[: _HEAD - len(self._head)])
                self._size += len(left)
                while left:
                    left = left[file.write(left) :]

    def read(self) -> bytes:
        """Return the whole content."""
        return self.path.read_bytes()

    def open(self) -> int:
        """Return a descriptor that reads the file."""
        return os.open(self.path, os.O_RDONLY)

    def link(self, target: Path) -> None:
        """Give the content a second name, or copy it to a disk that cannot."""
        target.unlink(missing_ok=True)
        try:
            os.link(self.path, target)
        except OSError:
            copyfile(self.path, target)

    def discard(self) -> None:
        """Delete the file, unless it belongs to somebody else. Whoever reads it now can go on."""
        if self._delete is not None:
            self._delete()


Buffer = bytes | bytearray | memoryview
Payload = bytes | bytearray | PayloadFile
