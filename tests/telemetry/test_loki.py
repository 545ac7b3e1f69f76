"""Log lines sent to Loki, in the form of its push API."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from ndif.config.settings import Settings
from ndif.telemetry.loki import LokiHandler
from ndif.telemetry.shipper import ShippingPolicy
from tests.telemetry.store import HANGS, HANGS_UP, Store
from tests.telemetry.test_metrics import sample
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

POLICY = ShippingPolicy(100_000, 10_000, interval_s=0.02, first_pause_s=0.05, longest_pause_s=0.2)
Entry = tuple[dict[str, str], int, str]


@contextmanager
def logging_to(
    url: str, policy: ShippingPolicy = POLICY, name: str = "of-a-test"
) -> Iterator[logging.Logger]:
    """Yield a logger of a process named `gateway`."""
    handler = LokiHandler(url, "gateway", policy)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    logger.propagate = False  # test reports cannot contain all characters of these lines
    try:
        yield logger
    finally:
        logger.propagate = True
        logger.setLevel(level)
        logger.removeHandler(handler)
        handler.close()


def entries(store: Store) -> list[Entry]:
    """Return the lines of a store: labels, time and text."""
    lines = []
    for batch in store.taken:
        assert batch.target == "/loki/api/v1/push"
        assert batch.headers["content-type"] == "application/json"
        content: dict[str, Any] = json.loads(batch.body)
        assert [*content] == ["streams"]
        for stream in content["streams"]:
            assert {*stream} == {"stream", "values"}
            for moment, line in stream["values"]:
                assert isinstance(moment, str)
                lines.append((stream["stream"], int(moment), line))
    return lines


def test_lines_arrive_in_streams_by_level() -> None:
    with Store() as store:
        began = time.time_ns()
        with logging_to(store.url, replace(POLICY, interval_s=60)) as logger:
            logger.info("first %s", "ünï\n模型 🙂 \ud800")
            logger.warning("second")
            logger.info("third")
            logger.log(5, "least")
            logger.log(35, "in between")
            logger.log(99, "most")
        (batch,) = store.taken
    streams = json.loads(batch.body)["streams"]
    labels = [stream["stream"] for stream in streams]
    assert labels == [
        {"job": "ndif", "process": "gateway", "level": level}
        for level in ("info", "warning", "critical")
    ]
    lines = entries(store)
    assert [line for _, _, line in lines] == [
        "INFO of-a-test: first ünï\n模型 🙂 \ud800",
        "INFO of-a-test: third",
        "WARNING of-a-test: second",
        "Level 35 of-a-test: in between",
        "Level 99 of-a-test: most",
    ]
    assert all(began - 10**6 <= moment <= time.time_ns() for _, moment, _ in lines)
    moments = [moment for _, moment, line in lines if line.startswith("INFO")]
    assert moments == sorted(moments)


def test_too_long_line_is_cut() -> None:
    with Store() as store:
        with logging_to(store.url, ShippingPolicy(10**6, 10**6)) as logger:
            logger.info("x" * 200_000)
        ((_, _, line),) = entries(store)
    assert len(line) == 64 << 10


def test_loki_url_may_have_user_and_path() -> None:
    with Store() as store:
        with logging_to(f"http://12:k%2Fey@127.0.0.1:{store.port}/proxy/") as logger:
            logger.info("hello")
        (batch,) = store.taken
    assert batch.target == "/proxy/loki/api/v1/push"
    assert batch.headers["authorization"] == "Basic MTI6ay9leQ=="


def test_failing_loki_logs_no_lines_to_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The handler is at the root logger, as in a server."""
    with Store(behaviour=500) as store, logging_to(store.url, name="") as logger:
        logger.info("a line")
        until(lambda: store.asked > 5)
        assert caplog.text.count("loki fails") == 1
        store.behaviour = 204
        until(lambda: store.taken)
        until(lambda: "loki works again" in caplog.text)
        logger.info("another")
        until(lambda: len(entries(store)) == 2)
    lines = [line for _, _, line in entries(store)]
    assert lines == ["INFO root: a line", "INFO root: another"]


@pytest.mark.parametrize("behaviour", [HANGS, HANGS_UP, 401, 404, 429, 500])
def test_failing_loki_blocks_no_logger_and_bounds_memory(behaviour: int) -> None:
    before = sample("ndif_telemetry_lost_total", destination="loki")
    with Store(behaviour=behaviour) as store, logging_to(store.url) as logger:
        took = []
        for number in range(1000):
            began = time.perf_counter()
            logger.info("%d %s", number, "x" * 1000)
            took.append(time.perf_counter() - began)
        assert sorted(took)[len(took) // 2] < 0.001
        (handler,) = (
            candidate for candidate in logger.handlers if isinstance(candidate, LokiHandler)
        )
        assert handler._shipper._size <= 100_000
        until(lambda: store.asked)
        store.behaviour = 204
        store.released.set()
        until(lambda: any(line.startswith("INFO of-a-test: 999 ") for *_, line in entries(store)))
        arrived = len(entries(store))
    lost = sample("ndif_telemetry_lost_total", destination="loki") - before
    assert 0 < arrived < 200
    assert arrived + lost == 1000


def test_unformattable_record_does_not_stop_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Store() as store:
        with logging_to(store.url) as logger:
            logger.info("%d", "no number")
            logger.info("fine")
        assert [line for *_, line in entries(store)] == ["INFO of-a-test: fine"]
    assert "Logging error" in capsys.readouterr().err


PROCESS = """
import logging, sys
from ndif.telemetry.loki import LokiHandler
handlers = [LokiHandler(sys.argv[1], "leader"), logging.StreamHandler()]
logging.basicConfig(level=logging.INFO, handlers=handlers)
logging.info("the last words")
"""


def test_last_lines_of_process_arrive() -> None:
    with Store() as store:
        subprocess.run([sys.executable, "-c", PROCESS, store.url], check=True)
        ((labels, _, line),) = entries(store)
    assert labels == {"job": "ndif", "process": "leader", "level": "info"}
    assert line == "INFO:root:the last words"


def test_hanging_loki_delays_process_exit_only_briefly() -> None:
    with Store(behaviour=HANGS) as store:
        process = subprocess.run(
            [sys.executable, "-c", PROCESS, store.url],
            check=True,
            timeout=PATIENCE_S,
            capture_output=True,
            text=True,
        )
    assert "The last items for loki were not sent in time" in process.stderr


def test_many_threads_can_log_at_once() -> None:
    with Store() as store:
        with logging_to(store.url, ShippingPolicy(10**7, 10_000, interval_s=0.02)) as logger:

            def log() -> None:
                for number in range(200):
                    logger.info("%s %d", threading.current_thread().name, number)

            threads = [threading.Thread(target=log) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            until(lambda: len(entries(store)) == 1600)
        assert len({line for *_, line in entries(store)}) == 1600


@pytest.mark.parametrize(
    "url", ["loki:3100", "ftp://loki", "http://loki:x", "http://", "http://loki?x=1"]
)
def test_invalid_loki_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="is not like https://user:password@host:3100"):
        Settings(loki_url=url)


def test_loki_url_is_a_secret() -> None:
    settings = Settings(loki_url="https://12:hunter2@loki.example.org/")
    assert "hunter2" not in repr(settings)
