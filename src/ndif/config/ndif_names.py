"""Variables of NDIF 0.1 that this server also reads, so that a file of them works here too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from ndif.hostname import is_loopback

FIELDS = {
    "NDIF_HOME": "session_root",
    "NDIF_REDIS_URL": "broker_url",
    "NDIF_POSTGRES_URL": "database_url",
    "NDIF_MIN_NNSIGHT_VERSION": "min_nnsight_version",
    "NDIF_MIN_PYTHON_VERSION": "min_python_version",
    "NDIF_DEFAULT_EXECUTION_TIMEOUT_SECONDS": "execution_timeout_seconds",
    "NDIF_DEFAULT_PADDING_BIAS": "default_padding_bytes",
    "NDIF_AUTOSCALING_MAX_REPLICAS": "autoscale_max_replicas",
    "NDIF_AUTOSCALING_WAIT_THRESHOLD_S": "autoscale_target_wait_s",
    "NDIF_AUTOSCALING_BACKOFF_S": "autoscale_cooldown_s",
    "NDIF_SANDBOX_POOL_SIZE": "runner_pool",
    "NDIF_STATUS_TTL_S": "status_cache_freq_s",
    "NDIF_STATUS_TIMEOUT_S": "status_request_timeout_s",
    "NDIF_INFLUX_URL": "influxdb_url",
    "NDIF_INFLUX_TOKEN": "influxdb_token",
    "NDIF_DASHBOARD_PASSWORD_HASH": "admin_password_hash",
    "NDIF_RAY_HEAD_ADDRESS": "ray_address",
}
"""Fields of the settings by the variable of NDIF 0.1."""

_INFLUX_BUCKET, _INFLUX_ORG = "NDIF_INFLUX_BUCKET", "NDIF_INFLUX_ORG"
_KEYS = ("object_store_access_key", "object_store_secret_key")
_MINIO = "minioadmin"
"""Default user and password of MinIO, which NDIF 0.1 does not change."""


class NdifNames(PydanticBaseSettingsSource):
    """A source of settings in variables of NDIF 0.1. Variables of this server take precedence."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Not used: see pydantic-settings."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Return the values by field name, or by validation alias for fields that have one."""
        given = _given(os.environ)
        fields = self.settings_cls.model_fields
        values = {field: value for _, field, value in _read(given)}
        values |= dict.fromkeys(_KEYS, _MINIO) if _is_minio(given) else {}
        return {
            str(fields[field].validation_alias or field): value for field, value in values.items()
        }


def sentences(environ: Mapping[str, str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each set variable of NDIF 0.1; `names` maps fields to this server's variables."""
    given = _given(environ)
    for other, field, _ in _read(given):
        name = names[field]
        if name in given:
            yield f"The variable {other} is not read, because {name} is set, which is its name here."
        else:
            yield f"The variable {other} is read as {name}, its name here."
    if _is_minio(given):
        yield (
            f"{' and '.join(names[field] for field in _KEYS)} are not set: the server uses MinIO's "
            f"default keys ({_MINIO}), which every user of this machine knows."
        )


def is_read(name: str) -> bool:
    """Return True if this server reads the NDIF 0.1 variable `name`, in upper case."""
    return name in {*FIELDS, _INFLUX_BUCKET, _INFLUX_ORG}


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    return {name.upper(): value for name, value in environ.items() if value}


def _read(given: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the field and the value for this server of each set variable of NDIF 0.1."""
    for name, field in FIELDS.items():
        if name not in given:
            continue
        value = given[name]
        if field == "influxdb_url" and _INFLUX_BUCKET in given:
            value = (
                f"{value.rstrip('/')}/{given[_INFLUX_BUCKET]}"  # the organisation is its token's
            )
        yield name, field, value


def _is_minio(given: Mapping[str, str]) -> bool:
    """Return True if the object store is on this machine and no variable sets its keys."""
    names = ("NDIF_OBJECT_STORE_URL", *(f"NDIF_{field.upper()}" for field in _KEYS))
    url, *keys = (given.get(name, "") for name in names)
    try:
        is_here = is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False  # the field's validator reports the invalid URL
    # A folder of secrets may contain the keys.
    return is_here and not any(keys) and "NDIF_SECRETS_DIR" not in given
