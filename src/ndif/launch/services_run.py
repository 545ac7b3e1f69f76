"""Services that run without a server beside them: one of them, or a further node of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ndif import __version__
from ndif.config import Settings
from ndif.launch.run import Run
from ndif.services.roles import Role
from ndif.services.service import Service
from ndif.session.folder import Own
from ndif.session.record import Record, record_of
from ndif.variables import changed


class ServicesRun(Run):
    """Services of ours, with a session of their own."""

    def __init__(
        self, options: Settings, role: Role, session: Own, services: Sequence[Service]
    ) -> None:
        super().__init__(options, session, session.log(services[0].name), services)
        self._role = role

    def answers(self) -> bool:
        """See `Run.answers`."""
        return all(service.answers(self.session) for service in self.services)

    async def _serve(self, up: Callable[[], None], stopping: asyncio.Event) -> None:
        up()
        await stopping.wait()

    def record(self) -> Record:
        """See `Run.record`."""
        service = self.services[0]
        return record_of(
            self.session.id,
            url=service.address,
            host=service.host,
            port=service.port,
            version=__version__,
            arguments=["--worker"] if self._role == "worker" else [self._role],
            settings=changed(self.options),
            node_type="worker" if self._role == "worker" else "head",
            services=self.places(),
        )
