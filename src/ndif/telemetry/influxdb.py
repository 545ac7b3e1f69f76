"""The writer of measurements to InfluxDB, by the write API of its version 1, which 2 and 3 have, too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from urllib.parse import unquote, urlencode, urlsplit

from ndif.config.groups import TelemetrySettings
from ndif.telemetry import measurements
from ndif.telemetry.endpoint import Endpoint
from ndif.telemetry.measurements import Measurement
from ndif.telemetry.shipper import Shipper, ShippingPolicy

_POLICY = ShippingPolicy(max_waiting=20_000, max_batch=2_000)
"""Numbers of measurements; one takes some 600 bytes of memory."""


@contextlib.asynccontextmanager
async def writing(
    settings: TelemetrySettings, policy: ShippingPolicy = _POLICY
) -> AsyncIterator[None]:
    """Write measurements to InfluxDB while the block runs, if the settings name one."""
    url = settings.influxdb_url.get_secret_value()
    if not url:
        yield
        return
    endpoint = endpoint_of(url, settings.influxdb_token.get_secret_value())
    lines([])  # imports the library now, and not beside the first jobs
    writer = Shipper[Measurement]("influxdb", lambda batch: endpoint.post(lines(batch)), policy)
    measurements.write_to(writer.put)
    try:
        yield
    finally:
        measurements.write_to(None)
        await asyncio.to_thread(writer.close)


def endpoint_of(url: str, token: str) -> Endpoint:
    """Return the address that writes into the database that is the last part of a URL's path."""
    before, _, database = urlsplit(url).path.rstrip("/").rpartition("/")
    query = urlencode({"db": unquote(database), "precision": "ns"})
    return Endpoint(url, f"{before}/write?{query}", "text/plain; charset=utf-8", token)


def lines(batch: Sequence[Measurement]) -> bytes:
    """Return measurements in line protocol."""
    # Half a second and 20 MiB, which only a server that writes to InfluxDB needs.
    from influxdb_client.client.write.point import Point

    return b"\n".join(
        Point.from_dict(
            {
                "measurement": each.name,
                "tags": each.tags,
                "fields": each.fields,
                "time": each.time_ns,
            }
        )
        .to_line_protocol()
        .encode(errors="replace")
        for each in batch
    )
