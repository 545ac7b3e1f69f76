"""The broker: it carries requests from the gateway to the queue, and responses to waiting clients."""

from ndif.stores.broker.memory import MemoryBroker as MemoryBroker
from ndif.stores.broker.port import LOST as LOST
from ndif.stores.broker.port import Broker as Broker
from ndif.stores.broker.port import BrokerError as BrokerError
from ndif.stores.broker.port import BrokerUnavailableError as BrokerUnavailableError
from ndif.stores.broker.port import ClientLeftError as ClientLeftError
from ndif.stores.broker.port import QueueFullError as QueueFullError
from ndif.stores.broker.port import Subscription as Subscription
from ndif.stores.broker.port import TooManyJobsError as TooManyJobsError
