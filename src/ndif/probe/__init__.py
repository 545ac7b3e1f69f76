"""Probes: real traces by real clients, which check that a server serves its models correctly."""
