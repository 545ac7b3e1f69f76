"""One run of `ndif start`: it starts services, serves until it is stopped, and stops the services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvloop

from ndif import __version__
from ndif.config.reference import changed
from ndif.config.settings import Settings
from ndif.launch.cluster_secret import ensure_cluster_secrets
from ndif.launch.log_rotation import rotate_forever
from ndif.launch.preflight import Prepared
from ndif.launch.run_folder import ActiveRunFolder, RunRecord, ServiceRecord
from ndif.launch.services.plan import addresses
from ndif.launch.services.ray import authentication
from ndif.launch.services.redis import url_with_password
from ndif.launch.services.service import ServiceError
from ndif.net import STOP_SIGNALS, Http, StartError, for_url, is_serving
from ndif.server.process_config import ProcessConfig
from ndif.server.supervised import Supervisor
from ndif.tasks import end
from ndif.telemetry import logs

_SERVER_START_TIMEOUT_S = 60

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ServiceRun:
    """One process with a run folder of its own, and the services that stop with it.

    The run publishes its folder, starts the services one after the other, serves (`_serve`), and stops the
    services in reverse. This base class runs one service alone: a named one, or a node that joins a Ray
    cluster.
    """

    options: Settings
    run_folder: ActiveRunFolder
    prepared: Prepared
    was_ready: bool = field(default=False, init=False)
    """True once the run has served."""

    @property
    def subject(self) -> str:
        """Return the run's name in a message, such as "The broker"."""
        return f"The {self.prepared.server.role}"

    @property
    def is_up(self) -> str:
        """Return the words before the run's address in a message, such as "The broker is"."""
        is_worker = self.prepared.server.role == "worker"
        return "A worker of the cluster" if is_worker else f"{self.subject} is"

    @property
    def log(self) -> Path:
        """Return the path of the run's log."""
        return self.run_folder.log(self.prepared.services[0].name)

    @property
    def _started_services(self) -> set[str]:
        return {service.name for service in self.prepared.services}

    @property
    def start_timeout_s(self) -> float:
        """Return the longest time in seconds that the start may take."""
        return _SERVER_START_TIMEOUT_S + sum(
            service.start_timeout_s for service in self.prepared.services
        )

    def answers(self) -> bool:
        """Return True if the run serves, as seen from another process."""
        return all(service.answers(self.run_folder) for service in self.prepared.services)

    def close_inherited(self) -> None:
        """Close the descriptors that a forked child now owns."""
        for listener in (self.prepared.listening, self.prepared.admin):
            if listener is not None:
                listener.close()

    def serve(
        self, handlers: Iterable[logging.Handler], on_ready: Callable[[RunRecord], None]
    ) -> None:
        """Serve until stopped; `handlers` also receive the log.

        Call `on_ready` once the run serves; raise a `StartError` if it never does.
        """
        logs.configure("server", self.options, [logging.FileHandler(self.log), *handlers])
        url, host, port, arguments = self._description()
        started = self._started_services
        admin = self.prepared.admin
        record = RunRecord.of_this_process(
            self.run_folder.id,
            url=url,
            host=host,
            port=port,
            version=__version__,
            arguments=arguments,
            settings=changed(self.options),
            node_type="worker" if self.prepared.server.role == "worker" else "head",
            admin_host="" if admin is None else self.options.admin_host,
            admin_port=0 if admin is None else admin.getsockname()[1],
            services={
                name: ServiceRecord(address, name in started)
                for name, address in addresses(self.options).items()
            },
        )
        self.run_folder.publish(record)

        def ready() -> None:
            self.was_ready = True
            _logger.info("%s at %s", self.is_up, url)
            on_ready(record)

        try:
            uvloop.run(self._run(ready))
        except Exception as error:
            if self.was_ready:
                raise
            # For the log, and for a terminal with --verbose.
            _logger.info("%s did not come up", self.subject, exc_info=True)
            if isinstance(error, ServiceError):
                raise StartError(str(error)) from error
            raise StartError(f"{self.subject} did not come up: {error}.") from error
        if not self.was_ready:
            raise StartError(f"{self.subject} did not come up.")
        _logger.info("Stopped")

    def close(self) -> None:
        """End the run folder; remove it if the run never served."""
        if self.was_ready:
            self.run_folder.end()
        else:
            self.run_folder.discard()

    async def _run(self, on_ready: Callable[[], None]) -> None:
        stopping = asyncio.Event()
        _stop_on_signals(stopping)
        supervisor = Supervisor(stopping)
        logs, options = self.run_folder.folder / "logs", self.options
        rotating = asyncio.create_task(
            rotate_forever(logs, options.log_max_bytes, options.log_files), name="log rotation"
        )
        try:
            for service in self.prepared.services:
                await service.start(supervisor, self.run_folder)
            if not stopping.is_set():
                await self._serve(supervisor, on_ready, stopping)
        finally:
            # The HTTP server has replaced the handlers. A further signal must not interrupt the stop.
            _stop_on_signals(stopping)
            await supervisor.stop()
            await end([rotating])

    async def _serve(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        """Serve until `stopping` is set, and call `on_ready` once the run serves."""
        if self.prepared.server.role == "broker":
            ensure_cluster_secrets(self.options)  # for the servers that use this broker
        on_ready()
        await supervisor.wait()

    def _description(self) -> tuple[str, str, int, list[str]]:
        """Return the URL, host and port for the record, and the arguments that repeat this start."""
        service, role = self.prepared.services[0], self.prepared.server.role
        argument = "--worker" if role == "worker" else role
        return service.address, service.host, service.port, [argument]


class ServerRun(ServiceRun):
    """The run of a server: in this process or, with a broker, in several processes that it supervises."""

    @property
    def subject(self) -> str:
        return "The server"

    @property
    def is_up(self) -> str:
        return "Serving"

    @property
    def log(self) -> Path:
        return self.run_folder.log()

    @property
    def url(self) -> str:
        """Return the address that the server listens on."""
        return f"http://{for_url(self.prepared.server.host)}:{self.prepared.port}"

    @property
    def _starts_head(self) -> bool:
        services = self.prepared.services
        return any(service.name == "ray" and not service.joins for service in services)

    def answers(self) -> bool:
        return is_serving(self.prepared.server.host, self.prepared.port)

    async def _serve(
        self, supervisor: Supervisor, on_ready: Callable[[], None], stopping: asyncio.Event
    ) -> None:
        listening, admin = self.prepared.listening, self.prepared.admin
        assert listening is not None  # noqa: S101 - the preflight of a server took its port
        config = ProcessConfig(
            listening=listening.fileno(),
            results=self.run_folder.results,
            secret=self.run_folder.signing_key(),
            token=self.run_folder.token() or "",
            host=self.prepared.server.host,
            deployments=self.prepared.deployments,
            admin=None if admin is None else admin.fileno(),
        )
        options = self.options
        if options.broker_url:
            config = replace(
                config,
                broker_url=url_with_password(options),
                cluster_secrets=ensure_cluster_secrets(options),
                ray_variables=await asyncio.to_thread(
                    authentication, options, starts=self._starts_head
                ),
            )
        else:
            # These imports take a second; a start that is refused or only supervises does not need them.
            from ndif.gateway.connection_limit import raise_descriptor_limit
            from ndif.server.embedded import Operator, Server
            from ndif.server.heap import return_free_memory

            return_free_memory()
            raise_descriptor_limit()
            http: Http
            server = Server(
                self.options,
                config.deployments,
                config.results,
                Operator(config.token, lambda: http.stop(), admin),
                host=config.host,
                secret=config.secret,
            )
            http = Http(server.uvicorn_config(listening), on_ready, server.farewell)
            await http.serve(sockets=[listening, *([] if admin is None else [admin])])
            return
        # Removed with the services' data when the run ends; after a crash, by the next run.
        file = self.run_folder.service_data("processes") / "config.json"
        config.write(file)
        dispatcher_log = self.run_folder.log("dispatcher")
        processes = config.processes(file, self.options.api_workers, self.log, dispatcher_log)
        await supervisor.start(processes, self.answers)
        if not stopping.is_set():
            on_ready()
            await supervisor.wait()

    def _description(self) -> tuple[str, str, int, list[str]]:
        server, port = self.prepared.server, self.prepared.port
        file = server.deployment_file
        arguments = [
            *([server.role] if server.role != "all" else []),
            *("--host", server.host, "--port", str(port)),
            *(["--insecure"] if server.insecure else []),
            *(["--deployment-config", str(file.absolute())] if file else []),
            *map(_absolute, server.checkpoints),
        ]
        return self.url, server.host, port, arguments


def _absolute(checkpoint: str) -> str:
    """Return a checkpoint argument that means the same in every working directory."""
    name, equals, place = checkpoint.partition("=")
    if not equals or "{" in name:
        return checkpoint
    return f"{name}={Path(place).expanduser().resolve()}"


def _stop_on_signals(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.set)
