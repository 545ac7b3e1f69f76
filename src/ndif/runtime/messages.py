"""The messages between a host and the processes of a model, each of which is the header of a frame.

`Signal` has those that say no more than their kind. The body of a frame is not described here: it is a
payload, a result, a printed line, or the sentence of a failure.
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
    """The messages without fields."""

    PING = "ping"
    PONG = "pong"
    FAILED = "failed"
    """A process cannot do what it is for; the body says why."""
    VERIFY = "verify"
    CACHE = "cache"
    CACHED = "cached"
    LOADED = "loaded"
    """The weight owner has loaded; the body is its export."""
    IDLE = "idle"
    """A runner waits for a request."""
    SPENT = "spent"
    """A runner serves no more; the body says why."""
    CLEAR_REFS = "clear refs"
    """The file by which a confined runner resets its peak of memory."""
    RUNNING = "running"
    LOG = "log"
    STREAM = "stream"
    AWAIT_UPLOAD = "await upload"
    UPLOAD = "upload"
    FILE = "file"
    """The file for a large result."""


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
    """The bytes, or steps, of loading that are done."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ShareWeights:
    """A question for memory that all processes with the same weights map."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The answer; a descriptor comes with it, unless there is too little memory."""

    filled: bool


@dataclass(frozen=True, slots=True)
class Filled:
    """The news that memory is filled, or is not usable."""

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
    """Content of the checkpoint's config.json; None if it is too large or no object."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The news that a model is loaded; the body is its structure as JSON."""

    model: LoadedModel
    load_s: float
    """Seconds that loading the weights took."""
    loaded_at: float
    exposed: bool
    """True if runners write to the same weights, as on GPUs."""


@dataclass(frozen=True, slots=True)
class ForkRunner:
    """An order to fork a runner; its channel comes along."""

    runner: str
    fresh: bool
    reused: bool


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
    """An order to the owner of weights to restore those that have changed."""

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
    """The news that they are there."""

    device: str


# Between a host and a runner


@dataclass(frozen=True, slots=True)
class Run:
    """An order to run a request, whose payload is the body."""

    compressed: bool
    env: Mapping[str, Any]
    """Settings of the request, as its client sent them."""
    max_payload: int
    max_result: int
    max_inline: int
    compress_inline: bool
    """True to compress a result in a frame; one in a file is compressed if the payload was."""
    nearby: bool
    """True if the client is near, so that little is won by compressing much."""
    size: int = 0
    """Bytes of its payload among those of several requests."""


@dataclass(frozen=True, slots=True)
class RunTogether:
    """An order to run several requests in one forward pass."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RunStep:
    """A part of a run and its Unix times."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """The cost of a run, by its runner."""

    peak_memory: Size
    steps: tuple[RunStep, ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """A question for a file of this size, for a large result."""

    size: Size


@dataclass(frozen=True, slots=True)
class Spilled:
    """The news that the file is written."""

    report: RunReport


@dataclass(frozen=True, slots=True)
class Returned:
    """A small result, which is the body."""

    compressed: bool
    report: RunReport


@dataclass(frozen=True, slots=True)
class Error:
    """The end of a run that failed; the body is the text for its user."""

    report: RunReport
    ends: bool = False
    """True if the runner ends, for the state of its device is lost."""


@dataclass(frozen=True, slots=True)
class InlineAnswer:
    """The place of one result in the body of `AnswersTogether`."""

    size: Size
    compressed: bool


@dataclass(frozen=True, slots=True)
class AnswersTogether:
    """The results of `RunTogether`; None for a request that has to run alone."""

    answers: tuple[InlineAnswer | None, ...]
    report: RunReport


Message = (
    Signal | StartModule | Load | Progress | ShareWeights | SharedMemory | Filled | Ready
    | ForkRunner | Forked | Exited | VerifyWeights | Verified | Uncache | Uncached
    | Run | RunTogether | Spill | Spilled | Returned | Error | AnswersTogether
)  # fmt: skip

_KINDS: dict[type, str] = {
    each: re.sub("(?<!^)(?=[A-Z])", " ", each.__name__).lower()
    for each in get_args(Message)
    if each is not Signal
}
# All are made here: a runner that is reset between requests must find no cache changed.
_DECODERS = {kind: decoder(each) for each, kind in _KINDS.items()}
_SIGNALS = {each.value: each for each in Signal}


def kind_of(message: Message) -> str:
    """Return the name of a message's kind."""
    return message.value if isinstance(message, Signal) else _KINDS[type(message)]


def header_of(message: Message) -> dict[str, Any]:
    """Return the fields of a message's header; their values are written by `to_json`."""
    if isinstance(message, Signal):
        return {"kind": message.value}
    names = message.__dataclass_fields__
    return {"kind": _KINDS[type(message)], **{name: getattr(message, name) for name in names}}


def message_of(kind: str, header: bytes) -> Message:
    """Return the message of a header of this kind, or raise ValueError if it has none."""
    if (signal := _SIGNALS.get(kind)) is not None:
        return signal
    if (decoder := _DECODERS.get(kind)) is None:
        raise ValueError(f"there is no frame {kind[:20]!r}")
    message: Message = read(decoder, header)
    return message
