"""Installation of packages: by uv with pip's configuration, or else by pip.

The Makefile runs this file before anything is installed: it imports only the standard library.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeVar

Tell = Callable[[str], None]
T = TypeVar("T")

_LAST_LINES = 8

# A later section of pip's configuration overrides an earlier one.
_SECTIONS = ("global", "install", ":env:")

# Settings of pip that change the packages or their destination, and that are not passed on to uv.
_PIP_ALONE = (
    *("no-binary", "only-binary", "pre", "require-hashes", "no-build-isolation"),
    *("target", "prefix", "user"),
)

_ADDED = re.compile(r" \+ ([A-Za-z0-9._-]+)==(\S+)")
_COUNTED = re.compile(r"Would install (\d+) packages?")
_PLAN = (" + ", " - ", " ~ ", "Would ")


class InstallError(Exception):
    """A failed installation: its reason, and the installer's last lines."""

    def __init__(self, reason: str, output: Iterable[str] = ()) -> None:
        self.reason = reason
        super().__init__("\n".join([f"{reason}. It said:", *output]) if output else reason)


class Package(NamedTuple):
    """A package in one version."""

    name: str
    version: str


def find_uv() -> str | None:
    """Return the path of uv: the one beside this interpreter, or else the one on PATH."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("uv")


def has_pip() -> bool:
    """Return True if this environment has pip."""
    return importlib.util.find_spec("pip") is not None


class Installer(ABC):
    """A program that takes the arguments of `pip install`, and installs into this environment."""

    name: str

    @abstractmethod
    def missing(self, requirements: Sequence[str], tell: Tell) -> list[Package]:
        """Return the packages that the requirements would bring into this environment."""

    @abstractmethod
    def install_into(self, folder: Path, packages: Sequence[str], tell: Tell) -> None:
        """Install exactly these packages, without their dependencies, into a folder."""

    @abstractmethod
    def run(self, arguments: Sequence[str], tell: Tell) -> None:
        """Install with these arguments of `pip install`; pass the output line by line to `tell`."""

    def _run(
        self,
        command: Sequence[str],
        tell: Tell,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        last: deque[str] = deque(maxlen=_LAST_LINES)
        try:
            with subprocess.Popen(  # noqa: S603 - an installer, and its caller's requirements
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process:
                for line in process.stdout or ():
                    last.append(line.rstrip())
                    tell(last[-1])
        except OSError as error:
            raise InstallError(f"{self.name} does not start: {error}") from error
        if process.returncode != 0:
            raise InstallError(f"{self.name} could not install it", last)


class Pip(Installer):
    """The pip of this environment."""

    name = "pip"

    def missing(self, requirements: Sequence[str], tell: Tell) -> list[Package]:
        """Return the packages in the report of pip's dry run."""
        with TemporaryDirectory() as scratch:
            report = Path(scratch, "report.json")
            self.run(["--dry-run", "--quiet", f"--report={report}", *requirements], tell)
            planned_items = json.loads(report.read_text(encoding="utf-8"))["install"]
        return [
            Package(item["metadata"]["name"], item["metadata"]["version"]) for item in planned_items
        ]

    def install_into(self, folder: Path, packages: Sequence[str], tell: Tell) -> None:
        """Install into a folder that does not exist yet."""
        self.run(["--no-deps", f"--target={folder}", *packages], tell)

    def run(self, arguments: Sequence[str], tell: Tell) -> None:
        """Run `pip install`."""
        options = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
        self._run([sys.executable, "-m", "pip", "install", *options, *arguments], tell)


class Uv(Installer):
    """The uv beside this interpreter or on PATH, configured like pip.

    It installs the same packages as pip: from the same indexes, within the same constraints. The
    constructor raises an `InstallError` if there is no uv, or if pip's settings cannot be passed on to it.
    """

    name = "uv"

    def __init__(self) -> None:
        program = find_uv()
        if program is None:
            raise InstallError(f"there is no uv beside {sys.executable} or on PATH")
        settings = pip_settings()
        if alone := [name for name in _PIP_ALONE if _is_enabled(settings, name)]:
            raise InstallError(
                f"pip is configured with {', '.join(alone)}, which is not passed on to uv"
            )
        self._environment = uv_environment(settings, os.environ)
        self._command = [program, "pip", "install", f"--python={sys.executable}"]
        self._command += ["--color=never", "--no-progress", "--compile-bytecode"]
        if _is_enabled(settings, "no-index"):  # uv has no variable for it
            self._command.append("--no-index")
        # For uv an argument replaces the variable; for pip it is one more constraint.
        for constraint in self._environment.get("UV_CONSTRAINT", "").split():
            self._command.append(f"--constraint={constraint}")

    def missing(self, requirements: Sequence[str], tell: Tell) -> list[Package]:
        """Return the packages in the plan of uv's dry run."""
        lines: list[str] = []

        def note(line: str) -> None:
            lines.append(line)
            if not line.startswith(_PLAN):  # the plan would also replace this environment's nnsight
                tell(line)

        self.run(["--dry-run", *requirements], note)
        return planned(lines)

    def install_into(self, folder: Path, packages: Sequence[str], tell: Tell) -> None:
        """Install copies, which share nothing with uv's cache."""
        self.run(["--no-deps", "--link-mode=copy", f"--target={folder}", *packages], tell)
        (folder / ".lock").unlink(missing_ok=True)  # uv's own lock, which every user may write

    def run(self, arguments: Sequence[str], tell: Tell) -> None:
        """Run `uv pip install`."""
        self._run([*self._command, *arguments], tell, self._environment)


def by_uv_or_pip(action: Callable[[Installer], T], tell: Tell) -> T:
    """Return the result of `action` with uv; if that fails, report the reason and use pip."""
    try:
        return action(Uv())
    except InstallError as error:
        if not has_pip():
            raise
        tell(f"{error.reason}: pip installs instead, which takes longer")
    return action(Pip())


def planned(lines: Iterable[str]) -> list[Package]:
    """Return the packages that uv would install, from the lines of its dry run."""
    added = [Package(*match.groups()) for line in lines if (match := _ADDED.fullmatch(line))]
    counts = [int(match[1]) for line in lines if (match := _COUNTED.fullmatch(line))]
    if counts != [len(added)]:  # a line in another form, as for a URL
        raise InstallError("uv's plan is not understood", lines)
    return added


def pip_settings() -> dict[str, str]:
    """Return pip's settings for `pip install`; without pip, only the settings in PIP_ variables."""
    if not has_pip():
        return settings_of(
            f":env:.{name.removeprefix('PIP_').lower().replace('_', '-')}={value!r}"
            for name, value in os.environ.items()
            if name.startswith("PIP_")
        )
    completed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        # Otherwise these variables could empty the list, or add lines to it.
        env={**os.environ, "PIP_QUIET": "0", "PIP_VERBOSE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise InstallError("pip's configuration cannot be read", completed.stderr.splitlines())
    return settings_of(completed.stdout.splitlines())


def settings_of(listing: Iterable[str]) -> dict[str, str]:
    """Return the settings for `pip install` that `pip config list` shows."""
    sections: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in listing:
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in sections and (setting := str(ast.literal_eval(value))):
            sections[section][name] = setting
    return {name: value for section in _SECTIONS for name, value in sections[section].items()}


def uv_environment(settings: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that gives uv pip's settings, except where UV_ variables are set."""
    ours = uv_variables(settings)
    # Pip uses these variables if nothing else is set.
    for bundle in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if environ.get(bundle):
            ours.setdefault("SSL_CERT_FILE", environ[bundle])
    # UV_INDEX_URL and UV_EXTRA_INDEX_URL are older names of these two.
    if "UV_INDEX_URL" in environ:
        ours.pop("UV_DEFAULT_INDEX", None)
    if "UV_EXTRA_INDEX_URL" in environ:
        ours.pop("UV_INDEX", None)
    own = {name: value for name, value in environ.items() if name.startswith("UV_")}
    return {**environ, **ours, **own}


def uv_variables(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of uv for pip's settings; `no-index` has none."""
    variables: dict[str, str] = {}
    for name, variable in (
        ("index-url", "UV_DEFAULT_INDEX"),
        ("proxy", "HTTP_PROXY"),
        ("proxy", "HTTPS_PROXY"),
        ("retries", "UV_HTTP_RETRIES"),
        ("cert", "SSL_CERT_FILE"),
        ("client-cert", "SSL_CLIENT_CERT"),
    ):
        if name in settings:
            variables[variable] = settings[name]
    for name, variable, separator in (
        ("extra-index-url", "UV_INDEX", " "),
        ("find-links", "UV_FIND_LINKS", ","),
        ("constraint", "UV_CONSTRAINT", " "),
        ("trusted-host", "UV_INSECURE_HOST", " "),
    ):
        if name in settings:
            variables[variable] = separator.join(settings[name].split())
    if "UV_INDEX" in variables:
        # For pip all indexes are equal; uv would stop at the first that has a package.
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if seconds := settings.get("timeout", settings.get("default-timeout")):
        variables["UV_HTTP_TIMEOUT"] = seconds.partition(".")[0]  # uv takes whole seconds
    if settings.get("keyring-provider") == "subprocess":
        variables["UV_KEYRING_PROVIDER"] = "subprocess"
    if "no-cache-dir" in settings:
        variables["UV_NO_CACHE"] = "true"
    return variables


def _is_enabled(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "0").lower() not in ("0", "n", "no", "f", "false", "off")


def main(arguments: Sequence[str]) -> None:
    """Install into this environment with the arguments of `pip install`."""

    def tell(line: str) -> None:
        if not line.startswith(_PLAN):  # the plan may list a hundred packages
            print(line, flush=True)

    try:
        by_uv_or_pip(lambda installer: installer.run(arguments, tell), tell)
    except InstallError as error:
        sys.exit(error.reason)


if __name__ == "__main__":
    main(sys.argv[1:])
