"""Keys and folders for the tests of object stores."""

from __future__ import annotations

import uuid
from pathlib import Path


def result_key() -> str:
    return f"results/{uuid.uuid4()}.pt"


def response_key() -> str:
    return f"responses/{uuid.uuid4()}.json"


def request_key() -> str:
    return f"requests/{uuid.uuid4()}"


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
