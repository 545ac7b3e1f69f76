"""The shipper: batches, losses and pauses, and stores that fail in every way."""

from __future__ import annotations

import gc
import logging
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ndif.telemetry.endpoint import Endpoint
from ndif.telemetry.shipper import RefusedBatchError, Shipper, ShippingPolicy, UnavailableError
from tests.services.process import free_port
from tests.telemetry.store import HANGS, HANGS_UP, SPEAKS_NO_HTTP, Store
from tests.telemetry.test_metrics import sample
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

POLICY = ShippingPolicy(100, 10, interval_s=0.02, first_pause_s=0.02, longest_pause_s=0.1)


class Destination:
    """A destination that accepts batches or raises a given error."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self.asked = 0

    def send(self, batch: Sequence[int]) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.batches.append([*batch])

    @property
    def items(self) -> list[int]:
        return [item for batch in self.batches for item in batch]


@contextmanager
def shipping(
    name: str, destination: Destination, policy: ShippingPolicy = POLICY
) -> Iterator[Shipper[int]]:
    shipper = Shipper[int](name, destination.send, policy)
    try:
        yield shipper
    finally:
        shipper.close()


def lost(name: str) -> float:
    return sample("ndif_telemetry_lost_total", destination=name)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "ndif.telemetry.shipper"
    ]


def test_items_arrive_in_order_and_in_batches() -> None:
    destination = Destination()
    with shipping("orderly", destination) as shipper:
        for item in range(95):
            shipper.put(item)
        until(lambda: len(destination.items) == 95)
    assert destination.items == [*range(95)]
    assert max(map(len, destination.batches)) <= 10
    assert lost("orderly") == 0


def test_batches_are_limited_by_item_size() -> None:
    destination = Destination()
    with shipping("sizes", destination) as shipper:
        with shipper._lock:  # nothing is sent before all items wait
            for item in range(6):
                shipper.put(item, 5)
        until(lambda: len(destination.items) == 6)
    assert destination.batches == [[0, 1], [2, 3], [4, 5]]


def test_oldest_items_are_dropped_and_counted() -> None:
    destination = Destination()
    destination.error = UnavailableError("away")
    with shipping("full", destination) as shipper:
        shipper.put(-1)
        until(lambda: destination.asked)
        for item in range(1000):
            shipper.put(item)
        assert len(shipper._waiting) == 100
        until(lambda: lost("full") == 900)
        destination.error = None
        until(lambda: len(destination.items) == 101)
        shipper.put(7, 1000)  # an item that never fits
        until(lambda: lost("full") == 901)
        shipper.put(8)
        until(lambda: destination.items[-1] == 8)
    assert destination.items == [-1, *range(900, 1000), 8]


def test_each_outage_and_recovery_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    destination = Destination()
    with shipping("told", destination) as shipper:
        for outage in (1, 2):
            destination.error = UnavailableError("away")
            shipper.put(outage)
            asked = destination.asked
            until(lambda: destination.asked > asked + 3)  # noqa: B023 - it is waited for here
            destination.error = None
            until(lambda: len(destination.items) == outage)  # noqa: B023
    assert lines(caplog) == ["told fails, and is tried again: away", "told works again"] * 2
    assert lost("told") == 0


def test_refused_batch_is_dropped_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    destination = Destination()
    with shipping("picky", destination) as shipper:
        for number, error in enumerate(
            (RefusedBatchError("bad form"), ZeroDivisionError("a defect")), 1
        ):
            destination.error = error
            shipper.put(0)
            until(lambda: lost("picky") == number)  # noqa: B023
        destination.error = None
        shipper.put(1)
        until(lambda: destination.items == [1])
    (line,) = lines(caplog)
    assert line.startswith("picky refuses a batch")
    assert line.endswith("bad form")


def test_unexpected_error_is_logged_with_traceback(caplog: pytest.LogCaptureFixture) -> None:
    destination = Destination()
    destination.error = ZeroDivisionError("a defect")
    with shipping("defect", destination) as shipper:
        shipper.put(0)
        until(lambda: lost("defect") == 1)
    assert "ZeroDivisionError: a defect" in caplog.text


def test_waiting_items_are_sent_on_close() -> None:
    destination = Destination()
    with shipping("last", destination, replace(POLICY, interval_s=60)) as shipper:
        for item in range(25):
            shipper.put(item)
    assert destination.items == [*range(25)]


def test_failing_store_does_not_delay_close() -> None:
    destination = Destination()
    destination.error = UnavailableError("away")
    policy = replace(POLICY, first_pause_s=2 * PATIENCE_S)
    with shipping("gone", destination, policy) as shipper:
        for item in range(25):
            shipper.put(item)
        until(lambda: destination.asked)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE_S
    assert lost("gone") == 25


def test_hanging_store_delays_close_only_briefly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    shipper = Shipper[int]("stuck", lambda _: release.wait(2 * PATIENCE_S) and None, POLICY)
    shipper.put(0)
    began = time.monotonic()
    shipper.close(0.2)
    assert 0.2 <= time.monotonic() - began < PATIENCE_S
    assert lines(caplog) == ["The last items for stuck were not sent in time"]
    release.set()


def test_finalizer_may_put_item_while_its_thread_holds_lock() -> None:
    destination = Destination()
    with shipping("finalizers", destination, replace(POLICY, interval_s=60)) as shipper:

        class Item:
            def __del__(self) -> None:
                shipper.put(1)

        with shipper._lock:
            Item()
            gc.collect()
    assert destination.items == [1]


def test_putting_an_item_takes_microseconds() -> None:
    destination = Destination()
    destination.error = UnavailableError("away")
    with shipping("quick", destination, ShippingPolicy(20_000, 2_000)) as shipper:
        took = []
        for item in range(30_000):
            began = time.perf_counter()
            shipper.put(item)
            took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 2] < 100e-6


@pytest.mark.parametrize(
    "behaviour", [HANGS, HANGS_UP, SPEAKS_NO_HTTP, 301, 401, 404, 429, 500, 503]
)
def test_batch_is_resent_if_store_does_not_accept_it(behaviour: int) -> None:
    name = f"store {behaviour}"
    with Store(behaviour=behaviour) as store:
        patience_s = 1.0 if behaviour == HANGS else PATIENCE_S
        endpoint = Endpoint(store.url, "/write", "text/plain", timeout_s=patience_s)
        shipper = Shipper[bytes](name, lambda batch: endpoint.post(b"".join(batch)), POLICY)
        began = time.monotonic()
        for number in range(300):
            shipper.put(b"%d " % number)
        assert time.monotonic() - began < 10
        until(lambda: store.asked > 2)
        until(lambda: lost(name) >= 190)
        assert store.taken == []
        store.behaviour = 204
        until(lambda: store.taken and store.taken[-1].body.endswith(b"299 "))
        shipper.close()
    arrived = b"".join(batch.body for batch in store.taken).split()
    assert arrived == sorted({*arrived}, key=int)
    assert len(arrived) + lost(name) == 300


@pytest.mark.parametrize("behaviour", [400, 413, 422])
def test_batch_refused_by_store_is_not_resent(
    behaviour: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"store {behaviour}"
    with Store(behaviour=behaviour) as store:
        endpoint = Endpoint(f"http://ann:hunter2@127.0.0.1:{store.port}", "/write", "text/plain")
        shipper = Shipper[bytes](name, lambda batch: endpoint.post(b"".join(batch)), POLICY)
        shipper.put(b"x")
        until(lambda: lost(name) == 1)
        shipper.close()
        assert store.asked == 1
    assert f"http://127.0.0.1:{store.port} answers {behaviour}" in caplog.text
    assert "hunter2" not in caplog.text


def test_absent_store_gets_items_once_it_appears() -> None:
    port = free_port()
    endpoint = Endpoint(f"http://127.0.0.1:{port}", "/write", "text/plain")
    shipper = Shipper[bytes]("absent", lambda batch: endpoint.post(b"".join(batch)), POLICY)
    for number in range(300):
        shipper.put(b"%d " % number)
    until(lambda: lost("absent") >= 190)
    with Store(port) as store:
        until(lambda: store.taken and store.taken[-1].body.endswith(b"299 "))
        shipper.close()


def test_slow_store_gets_newest_items() -> None:
    with Store(delay_s=0.2) as store:
        endpoint = Endpoint(store.url, "/write", "text/plain")
        shipper = Shipper[bytes]("slow", lambda batch: endpoint.post(b"".join(batch)), POLICY)
        for number in range(300):
            shipper.put(b"%d " % number)
            time.sleep(0.001)
        assert len(shipper._waiting) <= 100
        until(lambda: store.taken and store.taken[-1].body.endswith(b"299 "))
        shipper.close()
        arrived = b"".join(batch.body for batch in store.taken).split()
    assert len(arrived) + lost("slow") == 300


def test_certificate_of_store_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    with Store(tls=tls) as store:
        with pytest.raises(UnavailableError, match="certificate verify failed"):
            Endpoint(f"https://localhost:{store.port}", "/write", "text/plain").post(b"x")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(UnavailableError, match="verify failed: IP address mismatch"):
            Endpoint(f"https://127.0.0.1:{store.port}", "/write", "text/plain").post(b"x")
        assert store.asked == 0
        Endpoint(f"https://localhost:{store.port}", "/write", "text/plain").post(b"x")
        assert [batch.body for batch in store.taken] == [b"x"]
