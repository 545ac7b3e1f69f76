"""Probes: real traces by real clients, which say if a server serves its models and serves them right."""
