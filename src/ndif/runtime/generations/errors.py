"""What can be wrong with a payload, said to the one who sent it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from ndif.runtime.generations.port import BlockError, PayloadError
from ndif.runtime.tracebacks import explain


@contextmanager
def unpacking(generation: str) -> Iterator[None]:
    """Turn whatever unpickling raises into a `PayloadError` with a sentence."""
    try:
        yield
    except PayloadError:
        raise
    except SyntaxError as error:
        # The user's own code, at a line of theirs.
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
    # nnsight 0.8 has a class for it, its forebears a sentence.
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
