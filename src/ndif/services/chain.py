"""Services one after the other: each started once the one before answers, and ended in reverse."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ndif.services.kept import Kept
from ndif.services.service import Service, ServiceError
from ndif.session.folder import Session
from ndif.tasks import within

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LAST_LINES = 15


class Chain:
    """The services of a session that are ours."""

    def __init__(self, services: Sequence[Service], session: Session) -> None:
        self._services = services
        self._session = session
        self._kept: list[Kept] = []

    async def start(self, stopping: asyncio.Event) -> None:
        """Return once all answer, or when it is to stop before.

        Raises:
            ServiceError: with the last lines of the log of the one that does not come up.
        """
        for service in self._services:
            if stopping.is_set():
                return
            task = await service.task(self._session)
            kept = Kept(task)
            self._kept.append(kept)
            try:
                await within(self._answers(service, kept, stopping), service.comes_up_within_s)
            except (RuntimeError, asyncio.TimeoutError) as error:
                raise ServiceError(self._said(service)) from error
            kept.has_served = True
            logger.info("%s serves at %s", service.name, service.address)

    async def end(self) -> None:
        """End all that were started."""
        while self._kept:
            kept = self._kept.pop()
            await kept.end()
            logger.info("%s has ended", kept.task.name)

    async def _answers(self, service: Service, kept: Kept, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            if kept.keeping.done():
                kept.keeping.result()
            if await asyncio.to_thread(service.answers, self._session):
                return
            await asyncio.sleep(_POLL_S)

    def _said(self, service: Service) -> str:
        try:
            text = self._session.log(service.name).read_text(errors="replace")
        except OSError:
            text = ""
        what = f"The {service.name} at {service.address} did not come up"
        lines = text.splitlines()[-_LAST_LINES:]
        return "\n".join([f"{what}. The end of its log:", *lines] if lines else [f"{what}."])
