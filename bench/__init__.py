"""Measurements of speed and memory, each with a limit: `make bench`."""
