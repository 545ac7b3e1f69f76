"""An S3 server: what answers at `NDIF_OBJECT_STORE_URL`, and a MinIO of our own on this machine."""

from __future__ import annotations

from urllib.parse import urlsplit

from ndif.config import Settings
from ndif.gateway.origin import is_loopback
from ndif.gateway.serving import for_url
from ndif.services.missing import library, program
from ndif.services.service import Program, Service, ServiceError, folder
from ndif.session.folder import Session
from ndif.variables import name_of

NAME = "object-store"
_VARIABLE = name_of("object_store_url")
_LOOK_S = 2.0


def object_store(options: Settings, *, may_start: bool) -> Service | None:
    """What is to be started so that there is an object store; None where one answers, or none is wanted.

    Raises:
        ServiceError: if there is none and there can be none.
    """
    url = options.object_store_url
    if not url:
        return None
    library("obstore", _VARIABLE)
    if _answers(url):
        return None
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if parts.scheme != "http" or not is_loopback(host):
        raise ServiceError(
            f"Nothing answers at {url} ({_VARIABLE}). Start the S3 server there, or name another."
        )
    if not may_start:
        raise ServiceError(
            f"Nothing answers at {url} ({_VARIABLE}). `ndif start object-store` starts a MinIO there, and "
            "so does `ndif start`."
        )
    binary = program("minio", port=port)
    listens = f"{for_url('127.0.0.1' if host == 'localhost' else host)}:{port}"

    async def make(session: Session) -> Program:
        return Program(
            [binary, "server", "--address", listens, str(folder(session, NAME))],
            {
                "MINIO_ROOT_USER": options.object_store_access_key,
                "MINIO_ROOT_PASSWORD": options.object_store_secret_key.get_secret_value(),
                "MINIO_REGION": options.object_store_region,
                "MINIO_BROWSER": "off",
                "MINIO_UPDATE": "off",
            },
        )

    return Service(
        NAME, url, host, port, make, lambda _: _answers(url), comes_up_within_s=60, ends_within_s=20
    )


def _answers(url: str) -> bool:
    import httpx

    try:
        # Whatever it says to one without keys: it is there.
        httpx.get(url, timeout=_LOOK_S, verify=False, trust_env=False)  # noqa: S501
    except httpx.HTTPError:
        return False
    return True
