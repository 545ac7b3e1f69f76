"""Keeps results and the last response of each request until their time is over."""

from ndif.stores.objects.files import FileStore
from ndif.stores.objects.port import ObjectStore, Upload

__all__ = ["FileStore", "ObjectStore", "Upload"]
