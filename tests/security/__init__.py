"""Attacks on the server over its sockets."""
