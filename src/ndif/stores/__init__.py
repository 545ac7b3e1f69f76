"""Ports of the stores of a server, each with an embedded form."""
