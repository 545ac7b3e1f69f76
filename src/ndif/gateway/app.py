"""The gateway: every route of the server in one ASGI application (specification, section 3)."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.types import Lifespan

from ndif.gateway.hub import Hub
from ndif.gateway.origin import SameOrigin
from ndif.gateway.refusal import (
    Refusal,
    answer,
    answer_broker_away,
    answer_failure,
    answer_store_away,
    answer_unknown,
)
from ndif.gateway.socket_io import SocketIo
from ndif.stores.broker import BrokerError
from ndif.stores.objects import ObjectStoreError


def gateway(
    routes: Iterable[BaseRoute],
    socket_io: SocketIo,
    hub: Hub,
    lifespan: Lifespan[Starlette],
    *,
    loopback: bool,
) -> Starlette:
    """Put the routes together; `loopback` says that only this machine may come in."""
    return Starlette(
        routes=[
            *routes,
            Mount("/hub", routes=hub.routes()),
            Mount("/ws", app=socket_io.app),
        ],
        middleware=[Middleware(SameOrigin, loopback=loopback)],
        exception_handlers={
            Refusal: answer,
            BrokerError: answer_broker_away,
            ObjectStoreError: answer_store_away,
            HTTPException: answer_unknown,
            Exception: answer_failure,
        },
        lifespan=lifespan,
    )
