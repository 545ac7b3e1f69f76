"""The S3 server at `NDIF_OBJECT_STORE_URL`, or a MinIO that this machine runs there."""

from __future__ import annotations

from urllib.parse import urlsplit

from ndif.config.groups import ObjectStoreSettings
from ndif.config.reference import name_of
from ndif.hostname import is_loopback, numeric
from ndif.launch.run_folder import RunFolder
from ndif.launch.services.service import (
    Program,
    Service,
    ServiceError,
    require_package,
    require_program,
)
from ndif.net import for_url

NAME = "object-store"
_VARIABLE = name_of("object_store_url")
_TIMEOUT_S = 2.0


def object_store(options: ObjectStoreSettings, *, may_start: bool) -> Service | None:
    """Return the object store to start; None if one answers already or none is configured."""
    url = options.object_store_url
    if not url:
        return None
    require_package("obstore", _VARIABLE)
    if _answers(url):
        return None
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    no_answer = f"Nothing answers at {url} ({_VARIABLE})."
    if parts.scheme != "http" or not is_loopback(host):
        raise ServiceError(f"{no_answer} Start the S3 server there, or name another.")
    if not may_start:
        raise ServiceError(
            f"{no_answer} `ndif start object-store` starts a MinIO there, and so does `ndif start`."
        )
    binary = require_program("minio", port=port)
    listen_address = f"{for_url(numeric(host))}:{port}"

    async def make(run_folder: RunFolder) -> Program:
        return Program(
            [binary, "server", "--address", listen_address, str(run_folder.service_data(NAME))],
            {
                "MINIO_ROOT_USER": options.object_store_access_key,
                "MINIO_ROOT_PASSWORD": options.object_store_secret_key.get_secret_value(),
                "MINIO_REGION": options.object_store_region,
                "MINIO_BROWSER": "off",
                "MINIO_UPDATE": "off",
            },
        )

    return Service(NAME, url, host, port, make, lambda _: _answers(url))


def _answers(url: str) -> bool:
    import httpx

    try:
        # Any answer counts, even a refusal for missing credentials.
        httpx.get(url, timeout=_TIMEOUT_S, verify=False, trust_env=False)  # noqa: S501
    except httpx.HTTPError:
        return False
    return True
