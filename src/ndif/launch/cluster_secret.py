"""The secret that signs messages between the processes of a server with a broker.

All machines whose gateways or coordinators share a broker have the same secret. A server that starts its
own broker generates the secret, and its replicas receive it from the leader. The broker never stores it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from ndif.config.groups import FolderSettings
from ndif.config.reference import name_of
from ndif.config.settings import Settings
from ndif.config.variable_types import split_secrets
from ndif.launch.services.service import ServiceError
from ndif.stores.disk import open_private

VARIABLE = name_of("cluster_secret")
FILE = "cluster_secret"
"""Name of the file in the session root, for the next start and for services that are started alone."""


def cluster_secrets(options: Settings) -> tuple[str, ...]:
    """Return the secrets from the variable, else the named file, else the session root; else none."""
    if value := options.cluster_secret.get_secret_value():
        return split_secrets(value)
    if options.cluster_secret_file is not None:
        return _read(options.cluster_secret_file.expanduser())
    file = secret_file(options)
    return _read(file) if file.exists() else ()


def ensure_cluster_secrets(options: Settings) -> tuple[str, ...]:
    """Return the secrets; generate one in the session root if there is none."""
    if existing := cluster_secrets(options):
        return existing
    file = secret_file(options)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f".{FILE}-{os.getpid()}")
    try:
        with open_private(part) as output:
            output.write(f"{secrets.token_urlsafe(32)}\n")
        with contextlib.suppress(FileExistsError):  # another service of this root was faster
            os.link(part, file)
    finally:
        part.unlink(missing_ok=True)
    return _read(file)


def _read(file: Path) -> tuple[str, ...]:
    """Return the secrets in a file; raise a ServiceError if there is none."""
    try:
        values = split_secrets(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ServiceError(f"The cluster's secret cannot be read from {file}: {reason}.") from error
    except ValueError as error:
        raise ServiceError(f"The cluster's secret in {file} {error}.") from error
    if not values:
        raise ServiceError(f"The cluster's secret in {file} is missing: the file is empty.")
    return values


def secret_file(options: FolderSettings) -> Path:
    """Return the file of the secret in the session root."""
    return options.root / FILE


def assignment(secret: str) -> str:
    """Return the shell line that sets the secret on another machine."""
    return f"export {VARIABLE}={secret}"


def missing_secret(address: str) -> str:
    """Return the error for a server without a secret whose broker somebody else started."""
    example = assignment(secrets.token_urlsafe(32))
    return (
        f"The broker at {address} was started by somebody else, and {VARIABLE} is not set: without a "
        "secret that the broker does not know, everybody who writes to the broker could run code as this "
        f"server. Set the same secret for every `ndif start` that uses it, for example:\n    {example}"
    )
