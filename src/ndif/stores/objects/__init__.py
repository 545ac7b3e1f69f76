"""Keeps results and the last response of each request until their time is over."""

from ndif.stores.objects.files import FileStore
from ndif.stores.objects.open import open_store
from ndif.stores.objects.port import ObjectStore, ObjectStoreError, Upload

__all__ = ["FileStore", "ObjectStore", "ObjectStoreError", "Upload", "open_store"]
