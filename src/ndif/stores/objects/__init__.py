"""Objects: results, terminal responses and large payloads, stored until they expire."""

from __future__ import annotations

from pathlib import Path

from ndif.config.settings import Settings
from ndif.distribution import install_command
from ndif.stores.disk import free_bytes
from ndif.stores.objects.files import FileStore as FileStore
from ndif.stores.objects.port import DiskError as DiskError
from ndif.stores.objects.port import MemoryFullError as MemoryFullError
from ndif.stores.objects.port import ObjectStore as ObjectStore
from ndif.stores.objects.port import ObjectStoreError as ObjectStoreError
from ndif.stores.objects.port import Upload as Upload
from ndif.stores.objects.result_quota import ResultQuotaLimits


def open_store(settings: Settings, folder: Path, secret: str | None = None) -> ObjectStore:
    """Return a store on S3 if `NDIF_OBJECT_STORE_URL` names a server, else one of files below `folder`.

    Processes that share the folder sign its URLs with the same `secret`.
    """
    response_ttl_s = max(settings.response_ttl_s, settings.result_ttl_s)
    share, most = settings.max_stored_share, settings.max_stored_bytes
    if not settings.object_store_url:
        limits = ResultQuotaLimits(free_bytes(folder) // 2 if most is None else most, share)
        return FileStore(folder, settings.result_ttl_s, secret, limits, response_ttl_s)
    try:
        # Imported only here, because a server on one machine does not need obstore.
        from ndif.stores.objects.s3 import S3Address, S3Store
    except ImportError as error:
        raise ObjectStoreError(
            f"results on S3 need obstore ({error}) and Python 3.11 or later: run "
            f"`{install_command('obstore')}`"
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
        response_ttl_s=response_ttl_s,
        folder=folder,
        limits=ResultQuotaLimits(float("inf") if most is None else most, share),
    )
