from __future__ import annotations

import pytest

from ndif.config.short_ids import matching_ids, unique_length


@pytest.mark.parametrize(
    ("ids", "length"),
    [
        ([], 6),
        (["0123456789"], 6),
        (["0123456789", "0123456789"], 6),
        (["0123456789", "abcdef0123"], 6),
        (["0123456789", "01234567ff"], 9),
        (["r1", "r2"], 2),
        (["r1", "r1234567"], 6),
    ],
)
def test_unique_length_distinguishes_ids(ids: list[str], length: int) -> None:
    assert unique_length(ids) == length


def test_prefix_matches_ids() -> None:
    ids = ["abc", "abcd", "xyz", "xyz"]
    assert matching_ids("x", ids) == ["xyz"]
    assert matching_ids("ab", ids) == ["abc", "abcd"]
    assert matching_ids("abc", ids) == ["abc"]
    assert matching_ids("q", ids) == []
