from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from ndif.schema import envelope_wire, headers_wire, torch_format, wires
from ndif.schema.model_key import ModelKey
from ndif.schema.request import Request, Wire
from ndif.schema.response import InlineResult, Response, StoredResult
from ndif.schema.status import Status

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
# A pickle's own opcodes, a whole pickle, what text cannot hold, and a size beyond one byte's.
CONTENTS = [b"", b".", b"\x80\x02}q\x00.", bytes(range(256)), b"\x00" * 300_000]


def load(content: bytes) -> Any:
    """As both generations' `ResponseModel.unpickle` reads."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)


def saved(value: object, **options: Any) -> bytes:
    with io.BytesIO() as file:
        torch.save(value, file, **options)
        return file.getvalue()


def request(wire: Wire) -> Request:
    model = ModelKey("a.B", "org/name")
    return Request(model, "0.8", wire, b"", False, "http://here", session="s")


# torch's format


def test_torch_reads_a_mapping_of_plain_values() -> None:
    assert load(torch_format.dumps(PLAIN)) == PLAIN
    assert load(torch_format.dumps({})) == {}


def test_torch_reads_plain_values_without_running_anything() -> None:
    with io.BytesIO(torch_format.dumps(PLAIN)) as file:
        assert torch.load(file, weights_only=True) == PLAIN


@pytest.mark.parametrize("content", CONTENTS, ids=len)
def test_torch_reads_an_entry_of_bytes_as_they_are(content: bytes) -> None:
    read = load(torch_format.dumps_with(PLAIN, "data", content, load=False))
    assert read == {**PLAIN, "data": content}
    assert type(read["data"]) is bytes


@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}], ids=str
)
def test_torch_loads_an_entry_that_torch_saved(options: dict[str, Any]) -> None:
    storage = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    value = {"view": storage[1], "same": storage, "list": [torch.tensor(2.5), "text"]}
    read = load(torch_format.dumps_with(PLAIN, "data", saved(value, **options), load=True))
    data = read.pop("data")
    assert read == PLAIN
    assert data.keys() == value.keys()
    assert torch.equal(data["same"], storage)
    assert data["same"].dtype is torch.bfloat16
    assert data["view"].untyped_storage().data_ptr() == data["same"].untyped_storage().data_ptr()
    assert data["list"][1] == "text"
    assert data["list"][0].item() == 2.5


def test_the_entry_is_loaded_where_the_reader_wants_everything() -> None:
    content = torch_format.dumps_with({}, "data", saved(torch.ones(2)), load=True)
    assert load(content)["data"].device == torch.device("cpu")


def test_the_name_of_the_entry_is_free() -> None:
    for name in ("data", "", "naïve", "x" * 300):
        assert load(torch_format.dumps_with({}, name, b"1", load=False)) == {name: b"1"}


def test_the_content_is_written_once() -> None:
    content = b"0123456789" * 1000
    for is_loaded in (False, True):
        written = torch_format.dumps_with(PLAIN, "data", content, load=is_loaded)
        assert written.count(content) == 1
        assert len(written) < len(content) + 1000


def test_writing_needs_no_torch() -> None:
    code = (
        "import sys; from ndif.schema import torch_format, wires;"
        "torch_format.dumps_with({'a': 1}, 'data', b'', load=True);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The wire of nnsight 0.6 and 0.7


@pytest.mark.parametrize("status", list(Status))
def test_the_headers_wire_uses_the_statuses_that_its_clients_know(status: Status) -> None:
    known = {"RECEIVED", "QUEUED", "DISPATCHED", "RUNNING", "COMPLETED", "ERROR", "LOG", "STREAM"}
    read = load(headers_wire.frame(Response(ID, status, "Words.")))
    waiting = status in (Status.PROVISIONING, Status.DEPLOYING)
    expected = "QUEUED" if waiting else status.value
    assert read == {"id": ID, "status": expected, "description": "Words."}
    assert read["status"] in known
    assert type(read["status"]) is str


def test_the_headers_wire_gives_an_address_with_its_size() -> None:
    response = Response(ID, Status.COMPLETED, "Done.", STORED, {"execution_time": 1.0})
    assert load(headers_wire.frame(response))["data"] == (STORED.url, STORED.size)
    # Over HTTP it is JSON, which has no tuples, and of `meta` these clients know nothing.
    assert json.loads(json.dumps(headers_wire.fields(response))) == {
        "id": ID,
        "status": "COMPLETED",
        "description": "Done.",
        "data": [STORED.url, STORED.size],
    }


def test_the_headers_wire_streams_bytes() -> None:
    response = Response(ID, Status.STREAM, data=b"\x80\x04N.")
    assert load(headers_wire.frame(response))["data"] == b"\x80\x04N."


def test_the_headers_wire_gives_a_result_loaded() -> None:
    content = saved({"hidden": torch.ones(2, 3)})
    response = Response(ID, Status.COMPLETED, "Done.", InlineResult(content, False))
    read = load(headers_wire.frame(response))
    assert torch.equal(read["data"]["hidden"], torch.ones(2, 3))
    assert (read["id"], read["status"]) == (ID, "COMPLETED")


def test_the_headers_wire_takes_no_compressed_result() -> None:
    response = Response(ID, Status.COMPLETED, "Done.", InlineResult(b"", True))
    with pytest.raises(ValueError, match="must not be compressed"):
        headers_wire.frame(response)


# The wire of nnsight 0.8


@pytest.mark.parametrize("status", list(Status))
def test_the_envelope_wire_sends_text(status: Status) -> None:
    frame = envelope_wire.frame(Response(ID, status, "Ünïcode 🗼"))
    assert isinstance(frame, str)
    assert json.loads(frame) == {"id": ID, "status": status.value, "description": "Ünïcode 🗼"}


def test_the_envelope_wire_says_what_a_run_cost() -> None:
    meta = {"execution_time": 0.25, "peak_memory": 1 << 30}
    for status in (Status.COMPLETED, Status.ERROR):
        assert envelope_wire.fields(Response(ID, status, meta=meta))["meta"] == meta


def test_the_envelope_wire_gives_an_address() -> None:
    frame = envelope_wire.frame(Response(ID, Status.COMPLETED, "Done.", STORED))
    assert json.loads(frame)["data"] == STORED.url


@pytest.mark.parametrize("compressed", [False, True])
def test_the_envelope_wire_gives_a_result_as_bytes(compressed: bool) -> None:
    content = b"what the runner wrote, opaque \x00\xff"
    result = InlineResult(content, compressed)
    frame = envelope_wire.frame(Response(ID, Status.COMPLETED, "Done.", result, {"a": 1}))
    assert isinstance(frame, bytes)
    assert load(frame) == {
        "id": ID,
        "status": "COMPLETED",
        "description": "Done.",
        "meta": {"a": 1},
        "data": content,
    }


# Either


def test_a_response_takes_the_form_of_its_requests_wire() -> None:
    response = Response(ID, Status.DEPLOYING, "Words.")
    by_envelope, by_headers = request(Wire.ENVELOPE), request(Wire.HEADERS)
    assert json.loads(wires.frame(by_envelope, response))["status"] == "DEPLOYING"
    headers_frame = wires.frame(by_headers, response)
    assert isinstance(headers_frame, bytes)
    assert load(headers_frame)["status"] == "QUEUED"
    assert wires.fields(by_envelope, response)["status"] == "DEPLOYING"
    assert wires.fields(by_headers, response)["status"] == "QUEUED"
