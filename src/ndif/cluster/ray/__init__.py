"""Replicas as Ray actors, on the nodes of a Ray cluster."""

import os

# Without a connection, Ray's functions would start a Ray of their own and block the event loop.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
