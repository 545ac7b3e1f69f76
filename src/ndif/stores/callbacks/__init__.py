"""The durable queue of callbacks that wait for delivery, in a file or in Redis."""

from ndif.stores.callbacks.port import CallbackLimits as CallbackLimits
from ndif.stores.callbacks.port import CallbackQueue as CallbackQueue
from ndif.stores.callbacks.port import CallbackQueueError as CallbackQueueError
from ndif.stores.callbacks.sqlite import CALLBACKS as CALLBACKS
from ndif.stores.callbacks.sqlite import SqliteCallbacks as SqliteCallbacks
