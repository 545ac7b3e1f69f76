"""What an operator may ask of a running server, where it is refused."""

from __future__ import annotations


class OperationError(Exception):
    """An operation that is not carried out; the message says why, and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """As HTTP says it: 400, 404, 409, …"""
