from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from ndif.schema import wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status
from ndif.schema.wires import (
    envelope_fields,
    envelope_frame,
    header_fields,
    header_frame,
    join_header_frames,
)

ID = "01234567-89ab-cdef-0123-456789abcdef"
STORED = StoredResult("http://here/results/x?expires=1&signature=2", 12345)
PLAIN: dict[str, object] = {
    "id": ID,
    "status": "QUEUED",
    "description": "Ünïcode, 行, 🗼 and\na second line",
    "number": -7,
    "large": 1 << 80,
    "ratio": 0.1,
    "nothing": None,
    "pair": ("http://here", 12),
    "nested": {"a": [True, {"b": b"\x80.\x00"}]},
}
# A pickle opcode, a whole pickle, non-text bytes, and a size beyond one byte.
CONTENTS = [b"", b".", b"\x80\x02}q\x00.", bytes(range(256)), b"\x00" * 300_000]


def load(content: bytes) -> Any:
    """Load bytes as `ResponseModel.unpickle` of both generations does."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def saved(value: object, **options: Any) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file, **options)
        return file.getvalue()


def request(wire: Wire) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(model, "0.8", wire, b"", False, "http://here", subscription_id="s")


# torch's format


def test_torch_reads_mapping_of_plain_values() -> None:
    assert load(wires.torch_bytes(PLAIN)) == PLAIN
    assert load(wires.torch_bytes({})) == {}


def test_torch_reads_plain_values_without_running_code() -> None:
    with io.BytesIO(wires.torch_bytes(PLAIN)) as file:
        assert torch.load(file, weights_only=True) == PLAIN


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_torch_reads_bytes_entry_unchanged(content: bytes) -> None:
    read = load(wires.torch_bytes_with(PLAIN, "data", content, load=False))
    assert read == {**PLAIN, "data": content}
    assert type(read["data"]) is bytes


@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}], ids=str
)
def test_torch_loads_entry_that_torch_saved(options: dict[str, Any]) -> None:
    storage = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    value = {"view": storage[1], "same": storage, "list": [torch.tensor(2.5), "text"]}
    read = load(wires.torch_bytes_with(PLAIN, "data", saved(value, **options), load=True))
    data = read.pop("data")
    assert read == PLAIN
    assert data.keys() == value.keys()
    assert torch.equal(data["same"], storage)
    assert data["same"].dtype is torch.bfloat16
    assert data["view"].untyped_storage().data_ptr() == data["same"].untyped_storage().data_ptr()
    assert data["list"][1] == "text"
    assert data["list"][0].item() == 2.5


def test_entry_is_loaded_on_device_of_reader() -> None:
    content = wires.torch_bytes_with({}, "data", saved(torch.ones(2)), load=True)
    assert load(content)["data"].device == torch.device("cpu")


def test_entry_can_have_any_name() -> None:
    for name in ("data", "", "naïve", "x" * 300):
        assert load(wires.torch_bytes_with({}, name, b"1", load=False)) == {name: b"1"}


def test_content_is_written_once() -> None:
    content = b"0123456789" * 1000
    for is_loaded in (False, True):
        written = wires.torch_bytes_with(PLAIN, "data", content, load=is_loaded)
        assert written.count(content) == 1
        assert len(written) < len(content) + 1000


@pytest.mark.process
def test_writing_does_not_import_torch() -> None:
    code = (
        "import sys; from ndif.schema import wires;"
        "wires.torch_bytes_with({'a': 1}, 'data', b'', load=True);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The wire of nnsight 0.6 and 0.7


@pytest.mark.parametrize("status", list(Status))
def test_header_wire_uses_statuses_known_to_its_clients(status: Status) -> None:
    statuses = {
        "RECEIVED",
        "QUEUED",
        "DISPATCHED",
        "RUNNING",
        "COMPLETED",
        "ERROR",
        "LOG",
        "STREAM",
    }
    read = load(header_frame(Response(ID, status, "Words.")))
    waiting = status in (Status.PROVISIONING, Status.DEPLOYING)
    expected = "QUEUED" if waiting else status.value
    assert read == {"id": ID, "status": expected, "description": "Words."}
    assert read["status"] in statuses
    assert type(read["status"]) is str


def joined(*updates: Response) -> bytes | None:
    first, second = map(header_frame, updates)
    return join_header_frames(first, second)


@pytest.mark.parametrize("text", ["", "id", "LOG", "description", "Ünïcode, 行, 🗼", "x" * 16_000])
def test_log_frames_are_joined(text: str) -> None:
    frame = joined(Response(ID, Status.LOG, text), Response(ID, Status.LOG, "two"))
    assert frame == header_frame(Response(ID, Status.LOG, f"{text}\ntwo"))


def test_long_log_frames_are_not_joined() -> None:
    assert joined(Response(ID, Status.LOG, "x" * 17_000), Response(ID, Status.LOG, "two")) is None


def test_terminal_status_replaces_preceding_status() -> None:
    result = InlineResult(saved({"hidden": torch.ones(2, 3)}), False)
    end = Response(ID, Status.COMPLETED, "Done.", result)
    for status in (Status.QUEUED, Status.DEPLOYING, Status.DISPATCHED, Status.RUNNING):
        assert joined(Response(ID, status, "Words."), end) == header_frame(end)
    for response in (
        Response(ID, Status.LOG, "a line"),
        Response(ID, Status.STREAM, data=b"\x80\x04N."),
        Response("another", Status.RUNNING),
    ):
        assert joined(response, end) is None
    running = Response(ID, Status.RUNNING)
    for response in (running, end, Response(ID, Status.LOG), Response(ID, Status.STREAM, data=b"")):
        assert joined(Response(ID, Status.DISPATCHED), response) is None or response is end
        assert joined(end, response) is None


def test_header_wire_sends_result_address_with_size() -> None:
    response = Response(ID, Status.COMPLETED, "Done.", STORED, {"execution_time": 1.0})
    assert load(header_frame(response))["data"] == (STORED.url, STORED.size)
    # JSON has no tuples, and these clients do not know `meta`.
    assert json.loads(json.dumps(header_fields(response))) == {
        "id": ID,
        "status": "COMPLETED",
        "description": "Done.",
        "data": [STORED.url, STORED.size],
    }


def test_header_wire_streams_bytes() -> None:
    response = Response(ID, Status.STREAM, data=b"\x80\x04N.")
    assert load(header_frame(response))["data"] == b"\x80\x04N."


def test_header_wire_sends_loadable_result() -> None:
    content = saved({"hidden": torch.ones(2, 3)})
    response = Response(ID, Status.COMPLETED, "Done.", InlineResult(content, False))
    read = load(header_frame(response))
    assert torch.equal(read["data"]["hidden"], torch.ones(2, 3))
    assert (read["id"], read["status"]) == (ID, "COMPLETED")


def test_header_wire_rejects_compressed_result() -> None:
    response = Response(ID, Status.COMPLETED, "Done.", InlineResult(b"", True))
    with pytest.raises(ValueError, match="must not be compressed"):
        header_frame(response)


# The wire of nnsight 0.8


@pytest.mark.parametrize("status", list(Status))
def test_envelope_wire_sends_json_text(status: Status) -> None:
    frame = envelope_frame(Response(ID, status, "Ünïcode 🗼"))
    assert isinstance(frame, str)
    assert json.loads(frame) == {"id": ID, "status": status.value, "description": "Ünïcode 🗼"}


def test_envelope_wire_sends_cost_of_run() -> None:
    meta = {"execution_time": 0.25, "peak_memory": 1 << 30}
    for status in (Status.COMPLETED, Status.ERROR):
        assert envelope_fields(Response(ID, status, meta=meta))["meta"] == meta


def test_envelope_wire_sends_result_address() -> None:
    frame = envelope_frame(Response(ID, Status.COMPLETED, "Done.", STORED))
    assert json.loads(frame)["data"] == STORED.url


@pytest.mark.parametrize("compressed", [False, True])
def test_envelope_wire_sends_result_as_bytes(compressed: bool) -> None:
    content = b"what the runner wrote, opaque \x00\xff"
    result = InlineResult(content, compressed)
    frame = envelope_frame(Response(ID, Status.COMPLETED, "Done.", result, {"a": 1}))
    assert isinstance(frame, bytes)
    assert load(frame) == {
        "id": ID,
        "status": "COMPLETED",
        "description": "Done.",
        "meta": {"a": 1},
        "data": content,
    }


# Both


def test_response_frame_follows_wire_of_request() -> None:
    response = Response(ID, Status.DEPLOYING, "Words.")
    by_envelope, by_headers = request(Wire.ENVELOPE), request(Wire.HEADERS)
    assert json.loads(wires.frame(by_envelope, response))["status"] == "DEPLOYING"
    headers_frame = wires.frame(by_headers, response)
    assert isinstance(headers_frame, bytes)
    assert load(headers_frame)["status"] == "QUEUED"
    assert wires.fields(by_envelope, response)["status"] == "DEPLOYING"
    assert wires.fields(by_headers, response)["status"] == "QUEUED"
