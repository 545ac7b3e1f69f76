"""CHECKPOINT on a command line: a repo id, a model key, or a folder with the name that clients use."""

from __future__ import annotations

from pathlib import Path

from ndif.schema.deployment import DeploymentConfig, task_of
from ndif.schema.deployment_settings import SettingsError, config_of


class CheckpointError(ValueError):
    """An argument that names no checkpoint; the message says what would."""


def deployment_of(argument: str, *, here: bool = True) -> DeploymentConfig:
    """What ORG/NAME, a model key or ORG/NAME=FOLDER asks for; `here`: the folder is on this machine.

    Raises:
        CheckpointError: if it asks for nothing.
    """
    name, equals, place = argument.partition("=")
    if "{" in name or not equals:
        if "{" not in argument and _is_path(argument, here=here):
            raise CheckpointError(
                f"{argument} is a folder, and clients ask for a model by name: write ORG/NAME={argument}."
            )
        return _config(argument, {})
    _config(name, {})
    folder = Path(place).expanduser()
    if not here:
        if not folder.is_absolute():
            raise CheckpointError(
                f"{place} is to be a folder of the server's machine: write its whole path."
            )
        return _config(name, {"checkpoint": str(folder)})
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}.")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json: it is not a checkpoint's folder.")
    return _config(
        name, {"checkpoint": str(folder.resolve()), "task": task_of(folder / "config.json")}
    )


def _is_path(argument: str, *, here: bool) -> bool:
    return argument.startswith((".", "/", "~")) or (
        here and bool(argument) and Path(argument).is_dir()
    )


def _config(name: str, fields: dict[str, object]) -> DeploymentConfig:
    try:
        return config_of(name, fields)
    except SettingsError as error:
        raise CheckpointError(str(error)) from error
