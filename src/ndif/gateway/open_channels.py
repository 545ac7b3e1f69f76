"""The limits of live channels that are open at once, of an API key and of an address."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from ndif.config.settings import Settings
from ndif.gateway.http_error import RETRY_SOON, HttpError
from ndif.schema.limits import Limits
from ndif.stores.accounts import Account, Caller

_ADVICE = "Close one, run fewer traces at once, or send jobs with blocking=False, which need none."


class OpenChannels:
    """The live channels that this gateway holds open."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, caller: Caller, account: Account | None = None) -> Iterator[None]:
        """Count a channel until the end of the block, or raise an `HttpError` if it is one too many.

        Clients of the older wire send no key when they open theirs, and have no `account` then.
        """
        held: list[tuple[str, int | None]] = [
            (f"address {caller.name}", self._settings.max_channels_per_address)
        ]
        if account is not None and account.key:
            held.append((f"key {account.key}", Limits.of(self._settings, account.limits).channels))
        for name, most in held:
            if most is not None and self._open[name] >= most:
                whose = "Your API key" if name.startswith("key") else "Your address"
                channels = "one live channel" if most == 1 else f"{most} live channels"
                raise HttpError(
                    429,
                    f"{whose} may have {channels} open at once, and has as many. {_ADVICE}",
                    RETRY_SOON,
                )
        names = [name for name, _ in held]
        self._open.update(names)
        try:
            yield
        finally:
            self._open.subtract(names)
            for name in names:
                if not self._open[name]:
                    del self._open[name]
