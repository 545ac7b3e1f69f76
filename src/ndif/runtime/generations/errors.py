"""Errors of a request that its sender reads, and the translation of unpickling errors into them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from ndif.runtime.tracebacks import explain


class PayloadError(Exception):
    """The payload cannot be turned into a trace; the message tells its sender why."""


class BlockError(Exception):
    """The user's block raised. `traceback` is the text that its author reads."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.traceback = traceback


@contextmanager
def unpickling_errors(generation: str) -> Iterator[None]:
    """Translate the errors of unpickling a payload while the context lasts.

    Raises:
        PayloadError: if the payload cannot be read or is refused.
        BlockError: if the source code in the payload has a syntax error.
    """
    try:
        yield
    except PayloadError:
        raise
    except SyntaxError as error:
        # The error is in the user's own code and names a line of it.
        raise BlockError(explain(error, None, "")) from error
    except pickle.UnpicklingError as error:
        if type(error).__name__ == "ForbiddenError":
            raise PayloadError(f"The request was refused: {error}.") from error
        raise _unreadable(error, generation) from error
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        raise PayloadError(
            f"The block uses the module {error.name!r}, which this server does not have. "
            f"If it is your own, send it along: `import {root}; nnsight.register({root})` before the "
            "trace."
        ) from error
    except Exception as error:
        raise _unreadable(error, generation) from error


def _unreadable(error: Exception, generation: str) -> PayloadError:
    # nnsight 0.8 raises a class of its own for an unknown id; 0.6 and 0.7 raise a plain sentence.
    missing = str(error).removeprefix("Unknown persistent id: ")
    if type(error).__name__ == "UnknownPersistentIdError" or missing != str(error):
        return PayloadError(
            f"The block refers to {missing}, which the model here does not have. Does it use a "
            "second model, or one whose modules differ from the server's?"
        )
    return PayloadError(
        f"The request could not be read as an nnsight {generation} trace "
        f"({type(error).__name__}: {error}). It is truncated or damaged, or was made by a "
        "version of nnsight, transformers or Python whose objects this server cannot rebuild: "
        "compare them with nnsight.compare()."
    )
