"""Supervision of one model process: start, run, cancel, stop."""
