"""The release workflow: schema, trusted actions, and the commands that can run here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ndif import __version__
from ndif.distribution import NAME as DISTRIBUTION
from tests.deploy.dockerfile import DOCKERFILE, ROOT
from tests.deploy.test_image import INDEX, link_environment

pytestmark = pytest.mark.process

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
BIN = Path(sys.executable).parent
COMMIT = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")


def jobs() -> dict[str, Any]:
    job_table: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return job_table


def test_workflow_validates_against_github_schema() -> None:
    checker = [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows"]
    process = subprocess.run([*checker, WORKFLOW], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_every_action_is_pinned_by_commit_and_version() -> None:
    used = re.findall(r"uses: (.*)", WORKFLOW.read_text())
    assert used
    for line in used:
        action, _, version = line.partition(" # ")
        assert COMMIT.fullmatch(action), line
        assert re.fullmatch(r"v\d+\.\d+\.\d+", version), line


def test_jobs_have_minimal_permissions() -> None:
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {}
    rights = {name: job["permissions"] for name, job in jobs().items()}
    assert rights == {
        "wheel": {"contents": "read"},
        "image": {"contents": "read", "packages": "write"},
        "publish": {"id-token": "write"},
    }
    # External input, such as a tag name, is never part of a command.
    for job in jobs().values():
        assert not any("${{" in step.get("run", "") for step in job["steps"])


def test_image_build_arguments_exist_in_dockerfile() -> None:
    [build] = [step for step in jobs()["image"]["steps"] if "build-push" in step.get("uses", "")]
    assert ROOT / build["with"]["file"] == DOCKERFILE
    named = {line.partition("=")[0] for line in build["with"]["build-args"].splitlines()}
    assert named == {"TORCH_INDEX", "VERSION", "REVISION"}
    assert named <= set(re.findall(r"^ARG (\w+)", DOCKERFILE.read_text(), re.MULTILINE))


def test_workflow_steps_build_check_and_install_wheel(tmp_path: Path) -> None:
    steps = {step["name"]: step["run"] for step in jobs()["wheel"]["steps"] if "run" in step}
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_REF_NAME": f"v{__version__}",
        "TORCH_INDEX": INDEX,
        "UV_PYTHON": sys.executable,
    }

    def run(name: str) -> str:
        command = (
            steps[name]
            .replace("dist/", f"{tmp_path}/dist/")
            .replace("--out-dir dist", f"--out-dir {tmp_path}/dist")
            .replace('"dist', f'"{tmp_path}/dist')
        )
        process = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, f"{name}\n{process.stdout}{process.stderr}"
        return process.stdout

    for name in ("Build", "Compare the tag with the version", "Check the description"):
        run(name)
    run("Make an empty environment")
    # Packages that uv would download, so that uv only checks them.
    link_environment(tmp_path / "empty")
    run("Install the wheel in it")
    assert f"{DISTRIBUTION} {__version__}" in run("Run it")
    assert {*steps} - {"Install the installer"} <= {
        *("Build", "Compare the tag with the version", "Check the description"),
        *("Make an empty environment", "Install the wheel in it", "Run it"),
    }


@pytest.mark.parametrize("name", ["wheel", "image"])
def test_checkout_persists_no_credentials(name: str) -> None:
    [checkout] = [
        step for step in jobs()[name]["steps"] if "actions/checkout" in step.get("uses", "")
    ]
    assert checkout["with"]["persist-credentials"] is False
