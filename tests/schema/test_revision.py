"""Well-formed revisions, as Git and the server see them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ndif.schema.revision import is_reference, is_revision, require_revision

WELL_FORMED = [
    *("main", "v1.0", "feature/branch", "refs/pr/1", "step-3000", "a@b", "@main", "a%2fb", "{x}"),
    *("0123abc", "a" * 40, "a" * 255, "a.lock.b", "x'y", "größe"),
]
MALFORMED = [
    *("", "/", "/a", "a/", "a//b", ".", "..", ".a", "a/.b", "a..b", "a.", "a/..", "../../made5"),
    *("..\\..\\made5", "a\\b", "a b", "a\tb", "a\nb", "a\0b", "a\x7fb", "a~1", "a^", "a:b", "a?"),
    *("a*", "a[b", "@", "a@{1}", "a.lock", "a.lock/b"),
]
REFUSED_HERE_ALONE = ["a" * 256, "a\u202eb", "a\u2028b", "a\u00a0b", "a\ud800b"]


@pytest.mark.parametrize("revision", WELL_FORMED)
def test_well_formed_revision_is_accepted(revision: str) -> None:
    assert is_revision(revision)
    assert require_revision(revision) == revision


@pytest.mark.parametrize("revision", MALFORMED + REFUSED_HERE_ALONE)
def test_malformed_revision_is_refused(revision: str) -> None:
    assert not is_revision(revision)
    with pytest.raises(ValueError, match="must be a branch, a tag or a commit in the form"):
        require_revision(revision)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("revision", WELL_FORMED + [text for text in MALFORMED if "\0" not in text])
def test_git_agrees(revision: str) -> None:
    command = ["git", "check-ref-format", "--allow-onelevel", revision]
    checked = subprocess.run(command, check=False, capture_output=True)
    assert is_revision(revision) == (checked.returncode == 0)


@pytest.mark.parametrize("revision", ["refs/pr/1", "refs/convert/parquet", "REFS/pr/1"])
def test_whole_reference_is_recognized(revision: str) -> None:
    assert is_reference(revision)


@pytest.mark.parametrize("revision", ["main", "refs", "v/refs/pr/1", "0123abc"])
def test_branch_is_no_whole_reference(revision: str) -> None:
    assert not is_reference(revision)
