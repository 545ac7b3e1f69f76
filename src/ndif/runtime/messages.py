"""The messages between a host and the processes of a model; each message is the header of a frame.

Messages without fields are members of `Signal`. The body of a frame is not described here: it is a
payload, a result, a printed line, or the text of a failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from ndif.runtime.spec import ModelSpec
from ndif.runtime.typed_json import Size, decoder, read


class Signal(str, Enum):
    """A message without fields."""

    PING = "ping"
    PONG = "pong"
    FAILED = "failed"
    """The process has failed for good; the body is the reason."""
    VERIFY = "verify"
    CACHE = "cache"
    CACHED = "cached"
    LOADED = "loaded"
    """The weight owner has loaded the weights; the body is its pickled `ModelExport`."""
    IDLE = "idle"
    """A runner is ready for a request."""
    SPENT = "spent"
    """A runner cannot be reset and serves no further request; the body is the reason."""
    CLEAR_REFS = "clear refs"
    """Carries /proc/PID/clear_refs, through which a confined runner resets its memory peak."""
    RUNNING = "running"
    LOG = "log"
    STREAM = "stream"
    AWAIT_UPLOAD = "await upload"
    UPLOAD = "upload"
    FILE = "file"
    """Carries the file for a large result."""


# Between a host, the process that holds a model, and the owner of its weights


@dataclass(frozen=True, slots=True)
class StartModule:
    """An order to a fork server: run this module in a child."""

    module: str


@dataclass(frozen=True, slots=True)
class Load:
    """An order to load a model."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of loading, in bytes or steps."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ShareWeights:
    """A request to the host for memory that all processes with the same weights map."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The answer to `ShareWeights`, with a descriptor unless the host provides no memory."""

    filled: bool
    """True if the memory already holds the weights."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A report that shared memory is filled, or is not usable."""

    name: str
    usable: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Facts about a loaded model that its host may publish."""

    class_name: str
    parameters: int
    dtype: str
    device: str
    task: str | None
    folder: str
    config: Mapping[str, Any] | None
    """Content of the checkpoint's config.json; None if it is too large or cannot be sent as JSON."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A report that a model is loaded; the body is its structure as JSON."""

    model: LoadedModel
    load_s: float
    """Seconds that loading the weights took."""
    loaded_at: float
    exposed: bool
    """True if runners can write to the weights that all of them share, as on GPUs."""


@dataclass(frozen=True, slots=True)
class ForkRunner:
    """An order to fork a runner, with the runner's end of its channel."""

    runner: str
    fresh: bool
    """True for a confined runner of untrusted requests."""
    reused: bool
    """True if a fresh runner serves several requests of one key, with a reset after each."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The process id of a runner."""

    runner: str
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The exit code of a runner."""

    runner: str
    code: int


@dataclass(frozen=True, slots=True)
class VerifyWeights:
    """An order to the weight owner to restore changed weights."""

    keep_cache: bool


@dataclass(frozen=True, slots=True)
class Verified:
    """The number of tensors that were restored."""

    restored: int


@dataclass(frozen=True, slots=True)
class Uncache:
    """An order to move cached weights to GPUs."""

    max_memory: Mapping[int, int] | None


@dataclass(frozen=True, slots=True)
class Uncached:
    """A report that the cached weights are on the GPUs."""

    device: str


# Between a host and a runner


@dataclass(frozen=True, slots=True)
class Run:
    """An order to run a request; the body is its payload."""

    compressed: bool
    env: Mapping[str, Any]
    """Settings of the request, as its client sent them."""
    max_payload: int
    max_result: int
    max_inline: int
    compress_inline: bool
    """True to compress a result in a frame; a result in a file is zstd if the payload was."""
    nearby: bool
    """True if the client is so near that compression takes longer than it saves."""
    size: int = 0
    """Bytes of this payload in the body of `SharedRunOrder`."""


@dataclass(frozen=True, slots=True)
class SharedRunOrder:
    """An order to run several requests in one forward pass; the body is their payloads in order."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """A part of a run, with the Unix times of its start and end."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """The cost of a run, as its runner measured it."""

    peak_memory: Size
    steps: tuple[RunStep, ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """A request to the host for a file for a large result of this size."""

    size: Size


@dataclass(frozen=True, slots=True)
class Spilled:
    """A report that the file of a large result is written."""

    report: RunReport


@dataclass(frozen=True, slots=True)
class Returned:
    """The end of a run whose small result is the body."""

    compressed: bool
    report: RunReport


@dataclass(frozen=True, slots=True)
class Error:
    """The end of a run that failed; the body is the text for its user."""

    report: RunReport
    ends: bool = False
    """True if the runner ends because the state of its device is lost."""


@dataclass(frozen=True, slots=True)
class InlineAnswer:
    """The size and form of one result in the body of `SharedRunResults`."""

    size: Size
    compressed: bool


@dataclass(frozen=True, slots=True)
class SharedRunResults:
    """The results of `SharedRunOrder`; None means the request must be rerun individually."""

    answers: tuple[InlineAnswer | None, ...]
    report: RunReport


Message = (
    Signal | StartModule | Load | Progress | ShareWeights | SharedMemory | Filled | Ready
    | ForkRunner | Forked | Exited | VerifyWeights | Verified | Uncache | Uncached
    | Run | SharedRunOrder | Spill | Spilled | Returned | Error | SharedRunResults
)  # fmt: skip

_KINDS: dict[type, str] = {
    cls: re.sub("(?<!^)(?=[A-Z])", " ", cls.__name__).lower()
    for cls in get_args(Message)
    if cls is not Signal
}
# Created eagerly: the reset of a runner between requests would detect a cache that changed.
_DECODERS = {kind: decoder(cls) for cls, kind in _KINDS.items()}
_SIGNALS = {signal.value: signal for signal in Signal}


def kind_of(message: Message) -> str:
    """Return the name of a message's kind."""
    return message.value if isinstance(message, Signal) else _KINDS[type(message)]


def header_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message's header, for `to_json`."""
    if isinstance(message, Signal):
        return {"kind": message.value}
    names = message.__dataclass_fields__
    return {"kind": _KINDS[type(message)], **{name: getattr(message, name) for name in names}}


def message_of(kind: str, header: bytes) -> Message:
    """Return the message that a header of this kind holds, or raise ValueError."""
    if (signal := _SIGNALS.get(kind)) is not None:
        return signal
    if (decoder := _DECODERS.get(kind)) is None:
        raise ValueError(f"there is no frame {kind[:20]!r}")
    message: Message = read(decoder, header)
    return message
