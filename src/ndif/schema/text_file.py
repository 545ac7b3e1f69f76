"""A file that a person wrote, as text: no larger than people write them."""

from __future__ import annotations

from pathlib import Path


class TextFileError(ValueError):
    """It cannot be read; the message says why, and names it."""


def read_text(path: Path, most_mib: int) -> str:
    """What is in a file, without a byte order mark.

    Raises:
        TextFileError: if it cannot be read, is not UTF-8, or is larger than that.
    """
    most = most_mib * 1024**2
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise TextFileError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TextFileError(f"{path} is not text in UTF-8.") from error
    if len(content) > most:
        raise TextFileError(f"{path} is larger than {most_mib} MiB.")
    return text
