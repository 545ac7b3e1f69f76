"""Carries requests to the queue and responses to whoever waits for them."""

from ndif.stores.broker.memory import MemoryBroker
from ndif.stores.broker.port import Broker, BrokerError, LineFullError, Subscription

__all__ = ["Broker", "BrokerError", "LineFullError", "MemoryBroker", "Subscription"]
