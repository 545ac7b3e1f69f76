"""Replicas as Ray actors, on every machine of a Ray cluster."""

import os

# Without a connection, Ray's functions would start a Ray of their own, and the event loop waits for it.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
