"""The signer of every broker in the tests."""

from __future__ import annotations

from ndif.stores.broker.signing import Signer

SECRET = "a secret of the tests"
SIGNER = Signer([SECRET])
