from __future__ import annotations

from ndif.net import reachable_as


def test_public_url_makes_loopback_server_reachable() -> None:
    public = "https://ndif.example.org"
    assert reachable_as("127.0.0.1", "") is None
    assert reachable_as("127.0.0.1", public) == public
    assert reachable_as("0.0.0.0", "") == "0.0.0.0"
