"""Installation by uv with pip's configuration, and by pip if uv cannot install."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ndif.host import installer
from ndif.host.installer import (
    Installer,
    InstallError,
    Package,
    Pip,
    Uv,
    by_uv_or_pip,
    main,
    pip_settings,
    planned,
    settings_of,
    uv_environment,
    uv_variables,
)

pytestmark = pytest.mark.process

THING = "ndif-thing-of-a-test"


def write_wheel(folder: Path, version: str) -> None:
    """Write a wheel of a package that no index has."""
    name = THING.replace("-", "_")
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {THING}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that only pip's variables point to."""
    for variable in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(variable)
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("1.0", "2.0", "3.0"):
        write_wheel(folder, version)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def ignore(line: str) -> None:
    """Ignore the output of an installer."""


# Settings of pip


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({}, {}),
        ({"index-url": "https://a/simple"}, {"UV_DEFAULT_INDEX": "https://a/simple"}),
        (
            {"extra-index-url": "https://a/simple\nhttps://b/simple"},
            {
                "UV_INDEX": "https://a/simple https://b/simple",
                "UV_INDEX_STRATEGY": "unsafe-best-match",
            },
        ),
        ({"find-links": "/a https://b/c"}, {"UV_FIND_LINKS": "/a,https://b/c"}),
        ({"constraint": "/a.txt /b.txt"}, {"UV_CONSTRAINT": "/a.txt /b.txt"}),
        ({"trusted-host": "a\nb:8080"}, {"UV_INSECURE_HOST": "a b:8080"}),
        (
            {"proxy": "http://user:word@a:3128"},
            {"HTTP_PROXY": "http://user:word@a:3128", "HTTPS_PROXY": "http://user:word@a:3128"},
        ),
        (
            {"cert": "/ca.pem", "client-cert": "/me.pem"},
            {"SSL_CERT_FILE": "/ca.pem", "SSL_CLIENT_CERT": "/me.pem"},
        ),
        ({"timeout": "15.5"}, {"UV_HTTP_TIMEOUT": "15"}),
        ({"default-timeout": "180"}, {"UV_HTTP_TIMEOUT": "180"}),
        ({"retries": "9"}, {"UV_HTTP_RETRIES": "9"}),
        ({"keyring-provider": "subprocess"}, {"UV_KEYRING_PROVIDER": "subprocess"}),
        ({"keyring-provider": "import"}, {}),
        ({"no-cache-dir": "1"}, {"UV_NO_CACHE": "true"}),
        ({"disable-pip-version-check": "1", "no-index": "1", "quiet": "2"}, {}),
    ],
)
def test_pip_settings_become_uv_variables(
    settings: dict[str, str], variables: dict[str, str]
) -> None:
    assert uv_variables(settings) == variables


def test_pip_settings_precedence_is_variable_then_command_then_global() -> None:
    listing = [
        ":env:.find-links='/env'",
        "download.timeout='1'",
        "global.cert='/ca.pem'",
        "global.extra-index-url='\\nhttps://a\\nhttps://b'",
        "global.find-links='/global'",
        "global.proxy=''",
        "global.timeout='2'",
        "install.find-links='/install'",
        "install.timeout='3'",
    ]
    assert settings_of(listing) == {
        "cert": "/ca.pem",
        "extra-index-url": "\nhttps://a\nhttps://b",
        "find-links": "/env",
        "timeout": "3",
    }


@pytest.mark.process
@pytest.mark.parametrize("has_pip", [True, False])
@pytest.mark.usefixtures("wheels")
def test_pip_settings_are_read_with_and_without_pip(
    has_pip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "has_pip", lambda: has_pip)
    monkeypatch.setenv("PIP_QUIET", "3")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a https://b")
    assert pip_settings()["extra-index-url"] == "https://a https://b"


@pytest.mark.process
@pytest.mark.usefixtures("wheels")
def test_unreadable_pip_configuration_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(InstallError, match="configuration cannot be read"):
        Uv()


def test_uv_variables_are_not_overridden() -> None:
    settings = {
        "index-url": "https://pip",
        "extra-index-url": "https://pip/2",
        "find-links": "/pip",
        "cert": "/pip.pem",
    }
    assert uv_environment(settings, {"UV_FIND_LINKS": "/uv", "SSL_CERT_FILE": "/b.pem"}) == {
        "UV_DEFAULT_INDEX": "https://pip",
        "UV_INDEX": "https://pip/2",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/uv",
        "SSL_CERT_FILE": "/pip.pem",
    }
    older = {"UV_INDEX_URL": "https://uv", "UV_EXTRA_INDEX_URL": "https://uv/2"}
    assert uv_environment(settings, older).keys() & {"UV_DEFAULT_INDEX", "UV_INDEX"} == set()


def test_certificate_bundle_of_pip_is_used() -> None:
    environ = {"REQUESTS_CA_BUNDLE": "/r.pem", "CURL_CA_BUNDLE": "/c.pem"}
    assert uv_environment({}, environ)["SSL_CERT_FILE"] == "/r.pem"
    assert uv_environment({"cert": "/pip.pem"}, environ)["SSL_CERT_FILE"] == "/pip.pem"


@pytest.mark.process
@pytest.mark.usefixtures("wheels")
def test_uv_rejects_pip_settings_that_it_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "0")
    Uv()
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")
    with pytest.raises(InstallError, match="pip is configured with no-binary"):
        Uv()


# Both installers


@pytest.mark.process
@pytest.mark.parametrize("of", [Uv, Pip])
@pytest.mark.usefixtures("wheels")
def test_pip_find_links_are_honoured(of: type[Installer], tmp_path: Path) -> None:
    lines: list[str] = []
    of().install_into(tmp_path / "there", [f"{THING}==2.0"], lines.append)
    assert any(line.lower().startswith(("installed", "successfully")) for line in lines)
    (module,) = (tmp_path / "there").glob("*.py")
    assert module.read_text() == "VERSION = '2.0'\n"
    assert list((tmp_path / "there" / "__pycache__").iterdir())
    assert not (tmp_path / "there" / ".lock").exists()


@pytest.mark.process
@pytest.mark.parametrize("of", [Uv, Pip])
@pytest.mark.usefixtures("wheels")
def test_pip_constraints_add_to_given_constraints(
    of: type[Installer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of().missing([THING], ignore) == [Package(THING, "3.0")]
    (tmp_path / "machine.txt").write_text(f"{THING}<3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "machine.txt"))
    assert of().missing([THING], ignore) == [Package(THING, "2.0")]
    (tmp_path / "ours.txt").write_text(f"{THING}!=2.0\n")
    ours = f"--constraint={tmp_path / 'ours.txt'}"
    assert of().missing([THING, ours], ignore) == [Package(THING, "1.0")]


@pytest.mark.process
@pytest.mark.parametrize("of", [Uv, Pip])
@pytest.mark.usefixtures("wheels")
def test_install_error_quotes_last_lines_of_output(of: type[Installer], tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=rf"(?s)could not install it\. It said:.*{THING}"):
        of().install_into(tmp_path / "there", [f"{THING}==4.0"], ignore)


# One after the other


@pytest.mark.process
@pytest.mark.usefixtures("wheels")
def test_pip_installs_if_uv_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installer, "find_uv", lambda: None)
    main([f"--target={tmp_path / 'there'}", THING])
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"there is no uv beside {sys.executable} or on PATH: pip installs instead, "
        "which takes longer\n"
    )
    assert f"Successfully installed {THING}-3.0" in printed


@pytest.mark.process
@pytest.mark.usefixtures("wheels")
def test_pip_installs_if_uv_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "uv"
    broken.write_text("#!/bin/sh\necho of no use >&2\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(installer, "find_uv", lambda: str(broken))
    lines: list[str] = []
    assert by_uv_or_pip(lambda by: by.missing([THING], lines.append), lines.append) == [
        Package(THING, "3.0")
    ]
    assert lines == [
        "of no use",
        "uv could not install it: pip installs instead, which takes longer",
    ]
    monkeypatch.setattr(installer, "has_pip", lambda: False)
    with pytest.raises(InstallError, match="of no use"):
        by_uv_or_pip(lambda by: by.missing([THING], ignore), ignore)


def test_install_plan_is_parsed_or_rejected() -> None:
    plan = [
        "Resolved 71 packages in 2s",
        "Would download 2 packages",
        "Would uninstall 1 package",
        "Would install 2 packages",
        " + astor==0.8.1",
        " - nnsight==0.8.1",
        " + nnsight==0.7.0",
    ]
    assert planned(plan) == [Package("astor", "0.8.1"), Package("nnsight", "0.7.0")]
    for other in (
        [*plan[:-1], " + nnsight @ file:///nnsight-0.7.0.whl"],
        plan[:-1],
        plan[4:],
        [*plan, *plan],
        [],
    ):
        with pytest.raises(InstallError, match="not understood"):
            planned(other)


# As a program


@pytest.mark.process
@pytest.mark.usefixtures("wheels")
def test_installer_runs_as_script_without_ndif(tmp_path: Path) -> None:
    command = [sys.executable, "-I", installer.__file__, f"--target={tmp_path / 'there'}"]
    process = subprocess.run([*command, THING], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert "Installed 1 package" in process.stdout
    assert list((tmp_path / "there").glob("*.py"))
    process = subprocess.run(
        [*command, "nothing-like-it"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "nothing-like-it" in process.stdout


def test_installer_imports_only_standard_library() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(installer.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).partition(".")[0])
    assert imported <= sys.stdlib_module_names
