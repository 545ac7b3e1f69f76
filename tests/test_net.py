from __future__ import annotations

from ndif.net import reachable_as


def test_a_proxy_opens_a_server_on_loopback_to_other_machines() -> None:
    public = "https://ndif.example.org"
    assert reachable_as("127.0.0.1", "") is None
    assert reachable_as("127.0.0.1", public) == public
    assert reachable_as("0.0.0.0", "") == "0.0.0.0"
