"""Checks and deployments of a server before its start."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from ndif.config.settings import Settings
from ndif.launch.preflight import Prepared, ServerOptions, preflight
from ndif.launch.services.ray import own_head
from ndif.net import StartError
from ndif.schema.deployment import DeploymentConfig


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def ready(
    root: Path, *checkpoints: str, file: Path | None = None, deployments: str = ""
) -> tuple[DeploymentConfig, ...]:
    options = Settings(session_root=root, deployments=deployments)
    prepared: Prepared = preflight(
        options, ServerOptions("127.0.0.1", free_port(), checkpoints, file)
    )
    prepared.listening.close()
    return prepared.deployments


def test_no_model_is_deployed_by_default(tmp_path: Path) -> None:
    assert ready(tmp_path) == ()


def test_deployment_precedence_is_arguments_then_file_then_variable(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("org/a: {replicas: 2}\norg/b: {replicas: 3}\n")
    deployments = ready(tmp_path, "ORG/b", file=file, deployments="org/a | org/c")
    assert {config.repo_id: (config.replicas, config.dedicated) for config in deployments} == {
        "org/a": (2, False),
        "org/c": (1, True),
        "ORG/b": (1, True),
    }


@pytest.mark.parametrize(
    ("address", "head", "broker", "expected"),
    [
        ("ray://localhost:{port}", 6379, "redis://localhost:6379/", "127.0.0.1:6380"),
        ("ray://localhost:{port}", 6379, "redis://localhost:6390/", "127.0.0.1:6379"),
        ("ray://localhost:{port}", 6379, "redis://localhost", "127.0.0.1:6380"),
        ("ray://127.0.0.1:{port}", 7000, "", "127.0.0.1:7000"),
        ("ray://10.255.255.1:{port}", 6379, "", None),
        ("localhost:{port}", 6379, "", None),
        ("auto", 6379, "", None),
        ("", 6379, "", None),
    ],
)
def test_unreachable_local_ray_address_gets_own_head(
    address: str, head: int, broker: str, expected: str | None
) -> None:
    def of(port: int) -> str | None:
        return own_head(
            Settings(ray_address=address.format(port=port), ray_head_port=head, broker_url=broker)
        )

    assert of(free_port()) == expected
    with socket.create_server(("127.0.0.1", 0)) as ray:
        assert of(ray.getsockname()[1]) is None


def test_preflight_does_not_create_session_root(tmp_path: Path) -> None:
    assert ready(tmp_path / "a" / "b") == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("total", "least"), [(10**11, 5 * 10**9), (10**13, 20 * 10**9)])
def test_low_disk_space_is_rejected(
    total: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large disk needs no more than a fixed size."""
    usage = type(shutil.disk_usage(tmp_path))

    def leave(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(total, total - free, free))

    leave(least - 10**8)
    with pytest.raises(StartError, match=rf"has (4|19)\.9GB free, less than {least // 10**9}GB: "):
        ready(tmp_path)
    leave(least)
    assert ready(tmp_path) == ()


def test_preflight_holds_port(tmp_path: Path) -> None:
    server = ServerOptions("127.0.0.1", free_port(), (), None)
    options = Settings(session_root=tmp_path)
    taken = rf"^Port {server.port} is in use\. Choose another"
    with preflight(options, server).listening, pytest.raises(StartError, match=taken):
        preflight(options, server)
    preflight(options, server).listening.close()
