"""The writer of measurements to InfluxDB, by the write API of version 1, which versions 2 and 3 keep."""

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
"""Numbers of measurements; a measurement takes about 600 bytes of memory."""


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
    lines([])  # imports the library now rather than during the first jobs
    writer = Shipper[Measurement]("influxdb", lambda batch: endpoint.post(lines(batch)), policy)
    measurements.write_to(writer.put)
    try:
        yield
    finally:
        measurements.write_to(None)
        await asyncio.to_thread(writer.close)


def endpoint_of(url: str, token: str) -> Endpoint:
    """Return the endpoint that writes into a database: the last part of the URL's path is its name."""
    before, _, database = urlsplit(url).path.rstrip("/").rpartition("/")
    query = urlencode({"db": unquote(database), "precision": "ns"})
    return Endpoint(url, f"{before}/write?{query}", "text/plain; charset=utf-8", token)


def lines(batch: Sequence[Measurement]) -> bytes:
    """Return measurements in line protocol."""
    # The import takes half a second and 20 MiB; only servers that write to InfluxDB need it.
    from influxdb_client.client.write.point import Point

    return b"\n".join(
        Point.from_dict(
            {
                "measurement": measurement.name,
                "tags": measurement.tags,
                "fields": measurement.fields,
                "time": measurement.time_ns,
            }
        )
        .to_line_protocol()
        .encode(errors="replace")
        for measurement in batch
    )
