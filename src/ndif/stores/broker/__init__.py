"""Carries requests from the gateway to the queue, and responses to the clients that wait for them."""

from ndif.stores.broker.memory import MemoryBroker
from ndif.stores.broker.port import (
    Broker,
    BrokerError,
    ClientLeftError,
    QueueFullError,
    Subscription,
)

__all__ = [
    "Broker",
    "BrokerError",
    "ClientLeftError",
    "MemoryBroker",
    "QueueFullError",
    "Subscription",
]
