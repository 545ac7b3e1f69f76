"""Ports to what keeps requests and results, each with its embedded form."""
