"""Where a bucket is, and how it is reached."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import UnknownConfigurationKeyError
from obstore.store import S3Store as Bucket

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config, S3Credential

_HOME_REGION = "us-east-1"
"""The only one that a new bucket is not told."""

_SECOND = timedelta(seconds=1)
_CONNECT = 5 * _SECOND
_REQUEST = 30 * _SECOND
"""A part that was not taken by then is sent again."""
_LARGE_ANSWER = 600 * _SECOND
_ALWAYS = 1000
"""Tries, of which only time makes an end."""


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, and who we are to its server."""

    url: str
    public_url: str
    """The same server as clients reach it."""
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str = "ndif"
    region: str = _HOME_REGION
    verify: bool | Path = True
    """Of the server's certificate: by the system's authorities, not at all, or by those of a file."""

    def bucket_at(self, url: str, patience_s: float, *, large_answers: bool = False) -> Bucket:
        """The bucket by one of the server's addresses, tried for `patience_s` while that is away.

        Raises:
            OSError: if the file of authorities cannot be read.
            ValueError: if it holds none.
            obstore.exceptions.BaseError: if the address is none.
        """
        config: S3Config = {
            "endpoint": url,
            "region": self.region,
            "skip_signature": False,
            "virtual_hosted_style_request": False,
            # TLS guards what is sent; without it a signature over the content does.
            "unsigned_payload": url.startswith("https:"),
        }
        newer: S3Config = {
            # What the environment says of Amazon would go before `endpoint`.
            "aws_endpoint_url_s3": url,
            # Not every server that speaks S3 deletes many at once.
            "disable_bulk_delete": True,
        }
        client = self._client(patience_s if large_answers else None)
        try:
            return self._bucket({**config, **newer}, client, patience_s)
        except UnknownConfigurationKeyError:  # obstore 0.10, the last for Python 3.10
            return self._bucket(config, client, patience_s)

    def tls(self) -> ssl.SSLContext | bool:
        """The same trust, for httpx.

        Raises:
            OSError: if the file of authorities cannot be read.
        """
        verify = self.verify
        return ssl.create_default_context(cafile=verify) if isinstance(verify, Path) else verify

    def location(self) -> str:
        """What a new bucket is told of where to be."""
        if self.region == _HOME_REGION:
            return ""
        return (
            '<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<LocationConstraint>{self.region}</LocationConstraint></CreateBucketConfiguration>"
        )

    def _bucket(self, config: S3Config, client: ClientConfig, patience_s: float) -> Bucket:
        return Bucket(
            self.bucket,
            config=config,
            client_options=client,
            # Not by name: then what the environment says of Amazon's own would be mixed with ours.
            credential_provider=self._credential,
            retry_config={
                "max_retries": _ALWAYS,
                "retry_timeout": patience_s * _SECOND,
                "backoff": {"init_backoff": _SECOND / 10, "max_backoff": 2 * _SECOND, "base": 2},
            },
        )

    def _credential(self) -> S3Credential:
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "token": None,
            "expires_at": None,
        }

    def _client(self, silence_s: float | None) -> ClientConfig:
        """`silence_s`: how long an answer of any length may stop."""
        options: ClientConfig = {
            "allow_http": True,
            "connect_timeout": _CONNECT,
            "timeout": _REQUEST,
        }
        if silence_s is not None:
            options["timeout"] = _LARGE_ANSWER
            options["read_timeout"] = silence_s * _SECOND
        if self.verify is False:
            options["allow_invalid_certificates"] = True
        elif isinstance(self.verify, Path):
            options["root_certificate"] = self.verify.read_bytes()
        return options
