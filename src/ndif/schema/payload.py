"""A request's payload: bytes in memory, or a file on this machine if it is large."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from shutil import copyfile
from tempfile import mkstemp

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
"""First bytes of a compressed payload or result."""
MAX_IN_MEMORY = 1 << 20
"""Maximum size, in bytes, of a payload that is kept in memory."""
_HEAD = 16


class PayloadFile:
    """A payload in a file, so that a waiting request takes no memory and no descriptor.

    Owns the file that `create` made, and deletes it at `discard` or with the object itself.
    """

    def __init__(self, path: Path) -> None:
        """Describe the complete file at `path`, which this object does not own."""
        self.path = path
        self._size = path.stat().st_size
        self._head = b""
        self._delete: weakref.finalize[..., PayloadFile] | None = None

    @classmethod
    def create(cls, folder: Path, prefix: str = "") -> PayloadFile:
        """Create an empty file in `folder`, for `append` to fill."""
        descriptor, path = mkstemp(prefix=prefix, dir=folder)
        os.close(descriptor)
        file = cls(Path(path))
        file._delete = weakref.finalize(file, Path(path).unlink, missing_ok=True)
        return file

    def __len__(self) -> int:
        return self._size

    def startswith(self, prefix: bytes) -> bool:
        """Return True if the appended content begins with `prefix`, of at most 16 bytes."""
        return self._head.startswith(prefix)

    def append(self, *pieces: Buffer) -> None:
        """Append pieces to the file; raise a FileNotFoundError if it was discarded."""
        # Without O_CREAT, a file that was discarded meanwhile is not created again.
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
        """Return a descriptor for reading the file."""
        return os.open(self.path, os.O_RDONLY)

    def link(self, target: Path) -> None:
        """Hard-link the file to `target`, or copy it if the target's file system does not allow a link."""
        target.unlink(missing_ok=True)
        try:
            os.link(self.path, target)
        except OSError:
            copyfile(self.path, target)

    def discard(self) -> None:
        """Delete the file if this object owns it. Open descriptors remain readable."""
        if self._delete is not None:
            self._delete()


Buffer = bytes | bytearray | memoryview
Payload = bytes | bytearray | PayloadFile
