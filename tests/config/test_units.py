from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndif.config import units
from ndif.config.units import DURATION_PATTERN, SIZE_PATTERN, Unit, parse_duration, parse_size
from ndif.sizes import format_size


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
def test_sizes_are_parsed(text: str | int, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    "text", ["", "12", "12G", "GiB", "-1GiB", "1e3MB", "1 2GiB", -1, True, 1.5, None]
)
def test_invalid_size_is_rejected(text: object) -> None:
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
def test_durations_are_parsed(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "90", "s", "-1s", "1 month", "15M", "m15", True, None, []])
def test_invalid_duration_is_rejected(text: object) -> None:
    with pytest.raises(ValueError, match=r'must be a duration, like "90s", "15m"'):
        parse_duration(text)  # type: ignore[arg-type]


@given(st.text(alphabet="0123456789. kKMGTiBbsmhd-", max_size=12))
def test_patterns_match_exactly_parsable_text(text: str) -> None:
    for pattern, read in ((SIZE_PATTERN, parse_size), (DURATION_PATTERN, parse_duration)):
        try:
            read(text)
        except ValueError:
            assert not re.search(pattern, text)
        else:
            assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, "-"),
        (0, "0B"),
        (512, "512B"),
        (1024**3, "1GiB"),
        (3 * 1024**3 // 2, "1.5GiB"),
        (500_000_000, "500MB"),
        (1_234_567_890, "1.1GiB"),
        (1024**4 - 1, "1TiB"),
        (2 * 1024**5, "2PiB"),
        (3 * 1000**6, "3EB"),
    ],
)
def test_sizes_are_formatted_with_units(count: int | None, shown: str) -> None:
    assert format_size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.4, "0.4s"),
        (59, "59s"),
        (75, "1m 15s"),
        (900, "15m"),
        (5400, "1h 30m"),
        (200_000, "2d 7h"),
    ],
)
def test_durations_are_formatted_with_units(seconds: float | None, shown: str) -> None:
    assert units.format_duration(seconds) == shown
    if seconds is not None:
        assert parse_duration(shown) == pytest.approx(seconds, rel=0.03)


@given(st.integers(0, 2**63))
def test_formatted_size_can_be_parsed(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.05)


@given(st.floats(0, 10**11))
def test_formatted_duration_can_be_parsed(seconds: float) -> None:
    assert parse_duration(units.format_duration(seconds)) == pytest.approx(
        seconds, rel=0.021, abs=0.0501
    )


@pytest.mark.parametrize(
    "endless", [float("inf"), float("-inf"), float("nan"), "inf", "nan", "1e999"]
)
def test_infinite_duration_is_rejected(endless: float | str) -> None:
    with pytest.raises(ValueError, match='must be a duration, like "90s"'):
        units.read_duration(endless)


@given(st.integers(0, 10**15))
def test_exact_size_round_trips(count: int) -> None:
    assert parse_size(units.format_exactly(count, Unit.BYTES)) == count


@given(st.floats(0, 10**9).filter(lambda seconds: seconds == 0 or seconds > 1e-3))
def test_exact_duration_round_trips(seconds: float) -> None:
    assert parse_duration(units.format_exactly(seconds, Unit.SECONDS)) == seconds


def test_exact_format_uses_short_units() -> None:
    sized = {1024**3: "1GiB", 100_000_000: "100MB", 1025: "1025B"}
    assert {count: units.format_exactly(count, Unit.BYTES) for count in sized} == sized
    timed = {5400: "90m", 3600: "1h", 0.25: "250ms", 90: "90s", 3.3: "3.3s"}
    assert {span: units.format_exactly(span, Unit.SECONDS) for span in timed} == timed
