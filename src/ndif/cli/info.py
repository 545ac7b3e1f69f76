"""`ndif info`: this machine's server, and the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ndif.cli.output import console, show_json, table, warn_of_unread_variables
from ndif.cli.server_client import (
    NoServerError,
    connect,
    json_option,
    no_server,
    options,
    run_folders,
    token_option,
)

if TYPE_CHECKING:
    from ndif.launch.run_folder import RunRecord


@click.command("info")
@click.option(
    "--config",
    "config",
    is_flag=True,
    help="Show the value and source of every variable.",
)
@click.option(
    "--env-example", is_flag=True, help="Print every variable with its default, as an .env file."
)
@click.option("--url", metavar="URL", help="With --config: address of another server.")
@token_option
@json_option
def command(
    config: bool, env_example: bool, url: str | None, token: str | None, as_json: bool
) -> None:
    """Show this machine's server with its address, process, files and services."""
    if env_example:
        from ndif.config.reference import example

        click.echo(example(), nl=False)
    elif config:
        _config(url, token, as_json)
    elif url is not None:
        raise click.UsageError(
            "--url needs --config; other information is available only on the server's own machine."
        )
    else:
        _session(as_json)


def _session(as_json: bool) -> None:
    from dataclasses import asdict

    from ndif.launch.services.plan import service_status

    services = service_status(run_folders())
    running = run_folders().running()
    if running is None:
        if not services:
            raise no_server()
        title, content = "Services", {}
        rows: list[tuple[str, Any]] = []
    else:
        run_folder, record = running
        log = run_folder.log("ray" if record.node_type == "worker" else "api")
        title = f"Session {record.session_id}"
        content = {**asdict(record), "folder": str(run_folder.folder), "log": str(log)}
        rows = [
            ("address", record.url),
            *_admin_address(record),
            ("process", record.pid),
            ("started", record.started),
            ("version", record.version),
            ("started with", " ".join(record.arguments)),
            ("folder", run_folder.folder),
            ("log", log),
        ]
    state = {True: "running", False: "does not answer", None: "found by Ray"}
    rows += [
        (name, f"{service.address}: {state[service.answers]}, {service.whose}")
        for name, service in services.items()
    ]
    rows += content.get("settings", {}).items()
    if as_json:
        described = {name: asdict(service) for name, service in services.items()}
        show_json({**content, "services": described})
    else:
        console().print(table(title, ["", ""], rows))


def _admin_address(record: RunRecord) -> list[tuple[str, Any]]:
    from ndif.net import for_url

    if not record.admin_port:
        return []
    return [("for operators", f"http://{for_url(record.admin_host)}:{record.admin_port}")]


def _config(url: str | None, token: str | None, as_json: bool) -> None:
    """Show the settings of the running server, or else of a server that would start now."""
    from dataclasses import asdict

    from ndif.config.reference import Variable, as_text, variables
    from ndif.schema.answer import adapter

    try:
        server = connect(url, token)
    except NoServerError:
        if url is not None:
            raise
        settings, owner = variables(options()), "a server started now"
    else:
        content = server.get("/admin/config")["settings"]
        settings = adapter(list[Variable]).validate_python(content)
        owner = f"the server at {server.url}"
    warn_of_unread_variables()
    if as_json:
        show_json({"settings": [asdict(variable) for variable in settings]})
        return
    rows = (
        (
            variable.name,
            as_text(variable.value, variable.unit) or None,
            variable.source,
            as_text(variable.default, variable.unit) or None,
            variable.meaning,
        )
        for variable in settings
    )
    headings = ("variable", "value", "source", "default", "meaning")
    console().print(table(f"Configuration of {owner}", headings, rows))
