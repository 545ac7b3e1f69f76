"""Redis, an S3 server and Ray: the services that a start needs, and how this machine runs them."""

from __future__ import annotations

from typing import Literal, get_args

Component = Literal["all", "api", "broker", "object-store", "ray"]
Role = Literal[Component, "worker"]
"""Task of one process of `ndif start`; a worker is a further node of a Ray cluster."""

COMPONENTS: tuple[Component, ...] = get_args(Component)
STANDALONE: tuple[Component, ...] = ("broker", "object-store", "ray")
"""Services that also run without a server, in start order."""
