"""`ndif version`: the version of ndif."""

from __future__ import annotations

import json
import platform

import click

from ndif.cli.output import show_json
from ndif.cli.server_client import json_option, options

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "redis", "obstore", "ray")


@click.command("version")
@click.option("--all", "everything", is_flag=True, help="Also print the versions of dependencies.")
@json_option
def command(everything: bool, as_json: bool) -> None:
    """Print the version of ndif; with --all also the versions of Python, nnsight, torch and others."""
    from ndif import __version__

    if not everything:
        click.echo(json.dumps({"version": __version__}) if as_json else __version__)
        return

    from ndif.distribution import NAME

    versions = {NAME: __version__, "Python": platform.python_version(), **_packages()}
    if as_json:
        show_json({"version": __version__, "versions": versions})
    else:
        for name, version in versions.items():
            click.echo(f"{name} {version or 'not installed'}")


def _packages() -> dict[str, str | None]:
    """Return the versions of the software that the server uses, by name; None if not installed."""
    from importlib import metadata

    from ndif.host.runtimes import Runtimes

    versions: dict[str, str | None] = {}
    runtimes = Runtimes(options().runtimes).installed()
    versions.update(
        (f"nnsight ({runtime.generation})", runtime.version) for runtime in runtimes.values()
    )
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    versions["Linux"] = platform.release()
    return versions
