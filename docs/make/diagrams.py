"""The library that draws diagrams in a browser, kept beside the site so that no page asks another host.

It is fetched once, from the registry of npm. Where that cannot be reached, a diagram stays text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import os
import tarfile
import urllib.request
from pathlib import Path

_VERSION = "11.12.0"
_URL = f"https://registry.npmjs.org/mermaid/-/mermaid-{_VERSION}.tgz"
_SHA512 = "ZudVx73BwrMJfCFmSSJT84y6u5brEoV8DOItdHomNLz32uBjNrelm7mg95X7g+C6UoQH/W6mBLGDEDv73JdxBg=="
"""Integrity of the archive, as the registry gives it."""
_INSIDE = "package/dist/mermaid.min.js"
_PATIENCE_S = 60

logger = logging.getLogger("mkdocs.diagrams")


def script(cache: Path) -> bytes | None:
    """Return the library, from `cache` if it is there; None where it can be had from nowhere."""
    kept = cache / f"mermaid-{_VERSION}.min.js"
    if not kept.is_file():
        try:
            with urllib.request.urlopen(_URL, timeout=_PATIENCE_S) as answer:
                archive = answer.read()
        except OSError as error:
            logger.info("Diagrams stay text: %s cannot be reached (%s).", _URL, error)
            return None
        if base64.b64encode(hashlib.sha512(archive).digest()).decode() != _SHA512:
            raise ValueError(f"{_URL} is another file than it was: its SHA-512 differs.")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            found = files.extractfile(_INSIDE)
            assert found is not None
            cache.mkdir(parents=True, exist_ok=True)
            unfinished = kept.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(found.read())
            unfinished.replace(kept)
    return kept.read_bytes()
