"""Carries requests to the queue and responses to whoever waits for them."""

from ndif.stores.broker.memory import MemoryBroker
from ndif.stores.broker.port import (
    Broker,
    BrokerError,
    ClientLeftError,
    LineFullError,
    Subscription,
)

__all__ = [
    "Broker",
    "BrokerError",
    "ClientLeftError",
    "LineFullError",
    "MemoryBroker",
    "Subscription",
]
