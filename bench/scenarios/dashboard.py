"""The dashboard: its bytes, the time until it is usable in Chromium, and the cost of many open pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from bench.figures import Figure
from bench.scenario import Site
from bench.servers.processes import client, server

_PAGES, _VISITS, _SECONDS = 200, 7, 30
_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = """
new MutationObserver((_, observer) => {
  if (!document.querySelector("#models tbody tr")) return;
  observer.disconnect();
  window.usableAfterMs = performance.now();
}).observe(document, {childList: true, subtree: true});
"""
"""Script that records when the page shows the first model and can be used."""


def processor_s(pid: int) -> float:
    """Return the seconds of a core that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextlib.contextmanager
def open_pages(url: str, count: int) -> Iterator[list[int]]:
    """Hold `count` event streams open; yield a list of the bytes that each has received."""
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    received = [0] * count
    streams = []
    head = f"GET /dashboard/events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    for _ in range(count):
        stream = socket.create_connection((parts.hostname, parts.port))
        stream.sendall(head)
        streams.append(stream)

    def read(index: int) -> None:
        with contextlib.suppress(OSError):
            while data := streams[index].recv(1 << 16):
                received[index] += len(data)

    readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(count)]
    for reader in readers:
        reader.start()
    try:
        yield received
    finally:
        for stream in streams:
            stream.shutdown(socket.SHUT_RDWR)
            stream.close()


def used_share(url: str, pid: int, *, busy: bool) -> float:
    """Return the share of a core that a server uses, with a client that sends jobs or without."""
    with ThreadPoolExecutor(1) as pool:
        if busy:
            sending = pool.submit(client, "dashboard", "0.8", url, str(_SECONDS + 15.0))
            time.sleep(10)  # until the client has started
        before, began = processor_s(pid), time.monotonic()
        time.sleep(_SECONDS)
        share = (processor_s(pid) - before) / (time.monotonic() - began)
        if busy:
            sending.result()
    return share


def first_load(url: str) -> Iterator[Figure]:
    """Measure the bytes of the page with its resources, and the time until it shows the models."""
    from playwright.sync_api import sync_playwright

    usable, sizes = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--no-proxy-server"]
        )
        for _ in range(_VISITS):
            with browser.new_context() as context:
                context.add_init_script(_SHOWN)
                page = context.new_page()
                page.goto(url)
                page.locator("#models tbody tr").first.wait_for()
                usable.append(page.evaluate("window.usableAfterMs") / 1e3)
                sizes.append(
                    page.evaluate(
                        "['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
                        ".reduce((total, each) => total + each.decodedBodySize, 0)"
                    )
                )
        browser.close()
    yield Figure("dashboard, first load", max(sizes) / 1e3, 300, "kB", how="before compression")
    how = f"median of {_VISITS} visits with an empty cache, at worst {max(usable):.2f} s"
    yield Figure(
        "dashboard, until it shows the models", statistics.median(usable), 1.0, "s", how=how
    )


def measure(site: Site) -> Iterator[Figure]:
    """Measure the dashboard of a server with one model."""
    with server(site.folder, site.environment) as (url, pid, _):
        yield from first_load(url)
        for busy, name in ((False, "nothing happens"), (True, "a job a second")):
            without = used_share(url, pid, busy=busy)
            with open_pages(url, _PAGES) as received:
                share = used_share(url, pid, busy=busy)
                size = statistics.median(received)
            how = f"{100 * share:.1f} % beside {100 * without:.1f} %; {size / 1e3:.0f} kB to each page"
            cost = 100 * (share - without)
            yield Figure(f"{_PAGES} open pages, {name}", cost, 5, "% of a core", how=how)
