"""What the server asks of a place that keeps results and responses."""

from __future__ import annotations

from typing import Protocol


class ObjectStoreError(Exception):
    """The store cannot be reached, or refuses; the message is a sentence for who runs the server."""


class Upload(Protocol):
    """An object in the making: a file descriptor that a runner writes to."""

    def fileno(self) -> int:
        """A descriptor, open for writing, that may be handed to another process."""
        ...

    async def commit(self, key: str) -> int:
        """Make what was written the object `key`; returns its size in bytes.

        Raises:
            ObjectStoreError: if the store is away, and stays away for long.
        """
        ...

    def discard(self) -> None:
        """Forget what was written. Does nothing after a commit."""
        ...


class ObjectStore(Protocol):
    """Objects by key: `results/{id}.pt`, `responses/{id}.json` (specification, section 8.4), and
    `requests/{id}`, what is too large for the queue.
    """

    ttl_s: float
    """Seconds that results and responses are kept."""

    async def start(self) -> None:
        """Begin to delete what is past its time."""
        ...

    async def stop(self) -> None:
        """Stop deleting."""
        ...

    def create(self) -> Upload:
        """A new object without a name."""
        ...

    async def put(self, key: str, content: bytes, *, soon: bool = False) -> None:
        """Store `content` as `key`, at once and whole.

        `soon`: better not than late, so a store that is away is not waited for.

        Raises:
            ObjectStoreError: if the store is away, and stays away for long.
        """
        ...

    async def get(self, key: str) -> bytes | None:
        """The content of `key`, or None where there is none.

        Raises:
            ObjectStoreError: if nobody can say, since the store is away.
        """
        ...

    async def delete(self, key: str) -> None:
        """Have nothing at `key`.

        Raises:
            ObjectStoreError: if the store is away.
        """
        ...

    def url(self, key: str, base_url: str, *, once: bool = False) -> str:
        """A signed address of `key` that expires with it.

        `once`: whoever gets it fetches it one time, so a store may delete the object soon after.
        """
        ...
