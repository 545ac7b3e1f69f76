"""Replicas as Ray actors, on every machine of a Ray cluster."""
