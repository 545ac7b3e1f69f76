"""The packages that `nnsight.compare()` finds on a server."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from ndif.distribution import NAME
from ndif.gateway.environment import environment


def test_packages_needed_only_by_server_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An environment with only this distribution and no remains of an earlier name.
    for name in (NAME, "redis", "uvicorn", "nnsight", "torch"):
        files = metadata.distribution(name).files or ()
        described = next(file for file in files if file.name == "METADATA").locate().parent
        (tmp_path / Path(described).name).symlink_to(described)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    packages = environment.__wrapped__(None).packages
    assert {"nnsight", "torch"} <= packages.keys()
    assert not {"redis", "uvicorn", "ndif"} & packages.keys()


def test_import_name_shared_by_packages_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, imported in (("one", "shared"), ("another", "shared"), ("third", "alone")):
        described = tmp_path / f"{name}-1.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (described / "top_level.txt").write_text(f"{imported}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert environment.__wrapped__(None).packages == {"alone": "1.0"}
