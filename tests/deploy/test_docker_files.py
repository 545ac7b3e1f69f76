"""The Dockerfile and docker-compose.yml: linters, and agreement with this server."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ndif.config.reference import unread
from ndif.config.settings import Settings
from ndif.launch.services import COMPONENTS
from tests.deploy.dockerfile import DOCKER, DOCKERFILE, ROOT, only, stages
from tests.services.packages import need
from tests.services.process import Process, free_port

pytestmark = pytest.mark.engine

COMPOSE = DOCKER / "docker-compose.yml"
SECRETS_SCRIPT = DOCKER / "make-secrets.sh"
BIN = Path(sys.executable).parent
PINNED = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
SPECIFIED = {"message_broker", "minio", "ray", "api", "prometheus", "influxdb", "grafana"}
OURS = {"ray", "ray_gpu", "api"}


def compose() -> dict[str, Any]:
    """Return the file with its merges done and no variable replaced."""
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return services


SERVICES: dict[str, dict[str, Any]] = compose()["services"]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of secrets, as the first `make up` makes it."""
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    subprocess.run(["sh", SECRETS_SCRIPT, folder], check=True)
    return folder


def test_hadolint_accepts_dockerfile() -> None:
    process = subprocess.run([BIN / "hadolint", DOCKERFILE], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_compose_file_follows_compose_specification() -> None:
    checker = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec"]
    process = subprocess.run([*checker, COMPOSE], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_image_runs_without_root_and_has_healthcheck() -> None:
    *_, last = stages()
    user = only(last, "USER")[-1].value
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes compares numbers"
    assert only(last, "HEALTHCHECK")[0].value.endswith('CMD ["ndif", "healthz"]')
    assert only(last, "CMD")[0].value == '["start", "--host", "0.0.0.0"]'


def test_every_image_is_pinned_by_digest() -> None:
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert base is not None
    assert PINNED.fullmatch(base[1])
    for stage in stages():
        assert stage[0].value.split()[0] == "${PYTHON_IMAGE}"
    for name, service in SERVICES.items():
        if name not in OURS:
            assert PINNED.fullmatch(service["image"]), name


def test_build_context_contains_only_copied_files() -> None:
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied: set[str] = set()
    for stage in stages():
        for instruction in only(stage, "COPY"):
            if not instruction.value.startswith("--from"):
                copied |= set(instruction.value.split()[:-1])
    assert sent == copied
    assert all((ROOT / name).exists() for name in sent)


def test_compose_has_specified_services_and_database() -> None:
    assert SERVICES.keys() == SPECIFIED | {"ray_gpu", "postgres"}
    assert {"cpu", "gpu"} == {
        profile for service in SERVICES.values() for profile in service.get("profiles", [])
    }
    gpu = SERVICES["ray_gpu"]
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    # Other services reach either node by the same name.
    assert gpu["networks"]["internal"]["aliases"] == ["ray"]


def test_every_service_is_confined_and_has_healthcheck(subtests: pytest.Subtests) -> None:
    for name, service in SERVICES.items():
        with subtests.test(name):
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert "privileged" not in service
            assert name in OURS or service["healthcheck"]["test"], "our own image has a check"
            for before in service.get("depends_on", {}).values():
                assert before["condition"] == "service_healthy"
            for port in service.get("ports", []):
                assert port.startswith(("127.0.0.1:", "${BIND:-127.0.0.1}:")), (
                    "nothing is open by default"
                )
            if name in OURS:
                component = service["command"][1]
                assert component in COMPONENTS


def test_mounted_files_and_volumes_exist() -> None:
    volumes = compose()["volumes"]
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in volumes


def test_server_reads_every_variable_of_compose() -> None:
    for name in OURS:
        assert unread(SERVICES[name]["environment"]) == []
        names = {*(secret_name.upper() for secret_name in SERVICES[name]["secrets"])}
        assert unread(dict.fromkeys(names, "1")) == []


def test_secrets_have_no_default_and_are_not_in_environment(secrets: Path) -> None:
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    contents = {file.name: file.read_text() for file in secrets.iterdir()}
    declared = compose()["secrets"]
    assert declared.keys() == contents.keys()
    assert all(secret["file"] == f"./secrets/{name}" for name, secret in declared.items())
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == contents.keys()
    values = [value for name, value in contents.items() if name != "hf_token"]
    assert len(set(values)) == len(values)
    assert min(map(len, values)) >= 64
    for service in SERVICES.values():
        for variable, value in service.get("environment", {}).items():
            if re.search(r"SECRET|PASSWORD|TOKEN", variable):
                assert str(value).startswith("/run/secrets"), variable


def test_secrets_are_created_once(secrets: Path) -> None:
    before = {file.name: file.read_text() for file in secrets.iterdir()}
    (secrets / "grafana_admin_password").unlink()
    subprocess.run(["sh", SECRETS_SCRIPT, secrets], check=True)
    after = {file.name: file.read_text() for file in secrets.iterdir()}
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"grafana_admin_password"}
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "deploy/docker/secrets/redis_password"], cwd=ROOT
    )
    assert ignored.returncode == 0, "a secret must never be committed"


def test_server_reads_secrets_from_files(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDIF_SECRETS_DIR", str(secrets))
    for name in ("URL", "ACCESS_KEY"):
        monkeypatch.setenv(f"NDIF_OBJECT_STORE_{name}", "http://minio:7070")
    monkeypatch.delenv("NDIF_OBJECT_STORE_ACCESS_KEY")
    options = Settings()
    password = (secrets / "redis_password").read_text()
    assert options.broker_url == f"redis://:{password}@message_broker:6379/0"
    assert (
        options.postgres_password.get_secret_value() == (secrets / "postgres_password").read_text()
    )
    assert options.object_store_access_key == (secrets / "ndif_object_store_access_key").read_text()
    monkeypatch.setenv("NDIF_BROKER_URL", "redis://elsewhere")
    assert Settings().broker_url == "redis://elsewhere"


def inside(text: str, secrets: Path, data: Path) -> str:
    """Return a command of a service with this machine's folders in place of the container's."""
    shell_line = text.replace("$$", "$").replace("/run/secrets", str(secrets))
    return shell_line.replace("--dir /data", f"--dir {data}")


def test_broker_starts_with_password_and_is_healthy(secrets: Path, tmp_path: Path) -> None:
    need("redis-server", "redis-server")
    service, port = SERVICES["message_broker"], free_port()
    script = inside(service["command"][0], secrets, tmp_path)
    script = script.replace("redis-server -", f"redis-server - --port {port}")
    check = inside(service["healthcheck"]["test"][1], secrets, tmp_path)
    check = check.replace("redis-cli ping", f"redis-cli -p {port} ping")

    def is_healthy() -> bool:
        return subprocess.run(["sh", "-c", check], capture_output=True).returncode == 0

    log = tmp_path / "log"
    process = Process([*service["entrypoint"], script], log, is_healthy, cwd=tmp_path)
    try:
        process.start()
        assert process.pid is not None
        shown = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert (secrets / "redis_password").read_text() not in shown
        # Redis replaces the shell, which would otherwise not pass on the stop signal.
        assert shown.startswith("redis-server")
        refused = subprocess.run(
            ["redis-cli", "-p", str(port), "ping"], capture_output=True, text=True
        )
        assert "NOAUTH" in refused.stdout + refused.stderr
    finally:
        process.stop()
    assert "User requested shutdown" in log.read_text()
    assert not is_healthy()


def test_compose_monitoring_matches_documented_files_except_addresses() -> None:
    def without_addresses(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without_addresses(item)
                for key, item in value.items()
                if key not in ("url", "targets")
            }
        return [*map(without_addresses, value)] if isinstance(value, list) else value

    def read(path: str) -> Any:
        return without_addresses(yaml.safe_load((ROOT / "deploy" / path).read_text()))

    assert read("docker/prometheus.yml") == read("prometheus/prometheus.yml")
    provisioned = read("docker/grafana-datasources.yml")["datasources"]
    folder = "grafana/provisioning/datasources"
    expected = [
        read(f"{folder}/{name}")["datasources"][0] for name in ("ndif.yml", "ndif-influxdb.yml")
    ]
    assert provisioned == expected


def test_make_builds_starts_and_stops_compose() -> None:
    environment = {"PATH": os.environ["PATH"]}
    process = subprocess.run(
        ["make", "--dry-run", "ta", "PROFILE=gpu"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    down, build, secrets, up = process.stdout.splitlines()
    for line in (down, build, up):
        assert " docker compose -f deploy/docker/docker-compose.yml " in line
        assert line.startswith(
            "TORCH_INDEX=https://download.pytorch.org/whl/cu130 NDIF_IMAGE=ndif-server:cuda "
        )
        assert "--profile gpu" in line
    assert " down " in down
    assert "--volumes" not in down
    assert build.endswith(" api")
    assert secrets == "sh deploy/docker/make-secrets.sh"
    assert " up " in up
