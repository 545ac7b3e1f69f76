"""The confinement of a client, which unpickles a server's results: it cannot reach the machine's files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from ndif.sandbox.confinement import limits
from ndif.sandbox.confinement.confinement import allowing_less, runtime_paths

_NETWORK = """
    /etc/resolv.conf /etc/hosts /etc/nsswitch.conf /etc/host.conf /etc/gai.conf /run/systemd/resolve
"""
_OWN_FACTS = "/proc/self /proc/stat /proc/sys"


def confine_client(folder: Path, readable: Iterable[Path] = ()) -> None:
    """Confine this process, which must have one thread, irrevocably with the layers that this kernel has.

    It may read its interpreter, its packages and `readable`, and write to `folder`, where its temporary
    files go. It may connect to any address, as a client does. It may not start programs.
    """
    tempfile.tempdir = str(folder)
    reading = [*runtime_paths(), *map(Path, (*_NETWORK.split(), *_OWN_FACTS.split())), *readable]
    with allowing_less("best-effort"):
        limits.keep_reading()
    with allowing_less("best-effort"):
        from ndif.sandbox.confinement.landlock import create_ruleset, restrict_self

        restrict_self(
            create_ruleset(reading, [Path("/dev/null")], (), [folder], allows_network=True)
        )
