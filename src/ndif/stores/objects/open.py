"""Which form of `ObjectStore` a server has: its settings say where the objects are."""

from __future__ import annotations

from pathlib import Path

from ndif.config import Settings
from ndif.stores.objects.files import FileStore
from ndif.stores.objects.port import ObjectStore, ObjectStoreError


def open_store(settings: Settings, folder: Path, secret: str | None = None) -> ObjectStore:
    """S3 where `NDIF_OBJECT_STORE_URL` names a server, else files below `folder`.

    `secret`: with which the processes that share the folder sign its addresses.

    Raises:
        ObjectStoreError: if what the settings say of the server cannot be used, or obstore is not there.
    """
    if not settings.object_store_url:
        return FileStore(folder, settings.result_ttl_s, secret)
    try:
        # What one machine does not need it does not import.
        from ndif.stores.objects.s3 import S3Store
        from ndif.stores.objects.s3_address import S3Address
    except ImportError as error:
        raise ObjectStoreError(
            f"results on S3 need obstore ({error}): pip install 'ndif[server]' on Python 3.11 or later"
        ) from error
    return S3Store(
        S3Address(
            url=settings.object_store_url,
            public_url=settings.object_store_public_url or settings.object_store_url,
            access_key=settings.object_store_access_key,
            secret_key=settings.object_store_secret_key.get_secret_value(),
            bucket=settings.object_store_bucket,
            region=settings.object_store_region,
            verify=settings.object_store_verify,
        ),
        settings.result_ttl_s,
    )
