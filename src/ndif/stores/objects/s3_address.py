"""The address of an S3 bucket, and the options of its clients."""

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
"""The only region that a request for a new bucket must not name."""

_SECOND = timedelta(seconds=1)
_CONNECT = 5 * _SECOND
_REQUEST = 30 * _SECOND
"""Time after which a part that was not accepted is sent again."""
_LARGE_ANSWER = 600 * _SECOND
_ALWAYS = 1000
"""Number of retries that time always ends first."""


@dataclass(frozen=True, slots=True)
class S3Address:
    """A bucket, and this server's credentials for it."""

    url: str
    public_url: str
    """URL of the same server, as clients reach it."""
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str = "ndif"
    region: str = _HOME_REGION
    verify: bool | Path = True
    """Verify the server's certificate by the system's authorities, by those of a file, or not at all."""

    def bucket_at(self, url: str, patience_s: float, *, large_answers: bool = False) -> Bucket:
        """Return a client of the bucket at `url`, which retries an unreachable server for `patience_s`.

        Raises:
            OSError: if the file of authorities cannot be read.
            ValueError: if that file holds none.
            obstore.exceptions.BaseError: if `url` is invalid.
        """
        config: S3Config = {
            "endpoint": url,
            "region": self.region,
            "skip_signature": False,
            "virtual_hosted_style_request": False,
            # TLS protects the content in transit; without TLS a signature over the content does.
            "unsigned_payload": url.startswith("https:"),
        }
        newer: S3Config = {
            # Amazon's variables in the environment would override `endpoint`.
            "aws_endpoint_url_s3": url,
            # Some S3 servers cannot delete many objects at once.
            "disable_bulk_delete": True,
        }
        client = self._client(patience_s if large_answers else None)
        try:
            return self._bucket({**config, **newer}, client, patience_s)
        except UnknownConfigurationKeyError:  # obstore 0.10, the last for Python 3.10
            return self._bucket(config, client, patience_s)

    def tls(self) -> ssl.SSLContext | bool:
        """Return the same verification of certificates for httpx.

        Raises:
            OSError: if the file of authorities cannot be read.
        """
        verify = self.verify
        return ssl.create_default_context(cafile=verify) if isinstance(verify, Path) else verify

    def location(self) -> str:
        """Return the body of a request for a new bucket, which names its region."""
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
            # Credentials by name would be mixed with Amazon's variables in the environment.
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
        """Return client options; an answer may be of any length if it never stops for `silence_s`."""
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
