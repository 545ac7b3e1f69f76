"""Limits on concurrently open live channels, per API key and per address."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ndif.config.settings import Settings
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.schema.limits import KeyLimits
from ndif.stores.accounts import Account, Caller

_ADVICE = "Close one, run fewer traces at once, or send jobs with blocking=False, which need none."


class OpenChannels:
    """The live channels that this gateway holds open."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def count(self, caller: Caller, account: Account | None = None) -> Iterator[None]:
        """Count a channel until the end of the block; raise an `HttpError` (429) if it is one too many.

        `account` is None for clients of the older wire, which send no key when they open a channel.
        """
        if (refusal := self.refusal(caller, account)) is not None:
            raise refusal
        names = [*self._limits(caller, account)]
        self._open.update(names)
        try:
            yield
        finally:
            self._open.subtract(names)
            for name in names:
                if not self._open[name]:
                    del self._open[name]

    def refusal(self, caller: Caller, account: Account | None = None) -> HttpError | None:
        """Return the refusal of a further channel; None if the caller may open one."""
        for name, limit in self._limits(caller, account).items():
            if limit is not None and self._open[name] >= limit:
                holder = "Your API key" if name.startswith("key") else "Your address"
                channels = "one live channel" if limit == 1 else f"{limit} live channels"
                return HttpError(
                    429,
                    f"{holder} may have {channels} open at once, and has as many. {_ADVICE}",
                    RETRY_SOON,
                )
        return None

    def _limits(self, caller: Caller, account: Account | None) -> dict[str, int | None]:
        """Return the counters of a caller's channels by name, each with its limit (None: unlimited)."""
        of_address = self._settings.max_channels_per_address
        limits: dict[str, int | None] = {f"address {caller.name}": of_address}
        if account is not None and account.key:
            of_key = KeyLimits.of(self._settings, account.limits).channels
            limits[f"key {account.key}"] = of_key
        return limits
