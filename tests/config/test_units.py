from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12GiB", 12 * 1024**3),
        ("12 GiB", 12 * 1024**3),
        ("1.5gib", 3 * 1024**3 // 2),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("2TiB", 2 * 1024**4),
        ("7B", 7),
        ("0B", 0),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(text: str | int, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    "text", ["", "12", "12G", "GiB", "-1GiB", "1e3MB", "1 2GiB", -1, True, 1.5, None]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(
        ValueError, match=r'must be a size, like "12GiB", "500MB" or a whole number'
    ):
        parse_size(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("1h 30m", 5400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172_800),
        ("250ms", 0.25),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 month", "15M", "m15", True, None, []])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match=r'must be a duration, like "90s", "15m"'):
        parse_duration(text)  # type: ignore[arg-type]


@given(st.text(alphabet="0123456789. kKMGTiBbsmhd-", max_size=12))
def test_the_patterns_say_what_is_read(text: str) -> None:
    for pattern, read in ((SIZE_PATTERN, parse_size), (DURATION_PATTERN, parse_duration)):
        try:
            read(text)
        except ValueError:
            assert not re.search(pattern, text)
        else:
            assert re.search(pattern, text)
