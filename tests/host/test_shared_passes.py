"""The results of a shared forward pass, cut out of one frame."""

from __future__ import annotations

import pytest

from ndif.host.channel import ProtocolError
from ndif.host.shared_passes import contents_of
from ndif.runtime.messages import InlineAnswer

ANSWERS = (InlineAnswer(1, False), None, InlineAnswer(2, True))


def test_each_request_gets_its_part_of_body() -> None:
    assert contents_of(ANSWERS, b"abb", [2, 2, 2]) == [b"a", b"", b"bb"]


@pytest.mark.parametrize(
    ("body", "largest", "reason"),
    [
        (b"abb", [2, 2], "3 results for 2 requests"),
        (b"ab", [2, 2, 2], "not the size of its body"),
        (b"abbb", [2, 2, 2], "not the size of its body"),
        (b"abb", [2, 2, 1], "its result takes 2B, more than 1B"),
    ],
)
def test_results_that_do_not_fit_are_refused(body: bytes, largest: list[int], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        contents_of(ANSWERS, body, largest)
