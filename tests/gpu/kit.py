"""Build the GPU kit: everything that `make gpu` needs on a machine without a package registry.

Usage: kit.py PYTHON, such as 3.12. Writes `build/gpu-kit/` (the project and `wheels/`) and its archive.

The machine provides torch, numpy and their requirements. The kit carries every other requirement of the
project, at the versions of `constraints.txt`. The tests make their own models.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import Parser
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
KIT = ROOT / "build" / "gpu-kit"
MAX_BYTES = 60 << 20
OF_THE_MACHINE = frozenset({"torch", "numpy"})
"""Packages that the machine provides: they match its driver, and are too large for the kit."""
FOR_TESTS = ("pytest", "pytest-timeout", "psutil")
PROJECT = ("Makefile", "pyproject.toml", "constraints.txt", "src", "tests", "bench")
PLATFORMS = tuple(
    f"{name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
)


def target_environment(python: str) -> dict[str, str]:
    """Return the values of requirement markers for CPython `python` on Linux."""
    return {
        **default_environment(),
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
    }


def applies(requirement: Requirement, environment: Mapping[str, str], extras: set[str]) -> bool:
    """Return True if `requirement` applies in `environment` without an extra or with any of `extras`."""
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for extra in {"", *extras}
    )


def pins(lines: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the exact requirement of each package, from the lines of a constraints file."""
    requirements = (
        Requirement(line) for line in lines if line.strip() and not line.startswith("#")
    )
    return {
        canonicalize_name(pin.name): f"{pin.name}{pin.specifier}"
        for pin in requirements
        if applies(pin, environment, set())
    }


def requirements_of(wheel: Path) -> list[Requirement]:
    """Return the requirements in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode(), headersonly=True)
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def project_requirements() -> list[Requirement]:
    """Return the requirements of the project and of its GPU tests."""
    # The oldest supported Python has no tomllib.
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    own = re.findall(r'^ +"([^"]+)"', listed[1], re.MULTILINE)
    return [Requirement(line) for line in (*own, *FOR_TESTS)]


def download(requirements: Iterable[str], python: str, folder: Path) -> None:
    """Download the wheels of exact `requirements` for another Python into `folder`."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", f"--python-version={python}", *platforms]
    subprocess.run([*command, f"--dest={folder}", *requirements], check=True)


def collect_wheels(python: str, folder: Path) -> list[Path]:
    """Download every wheel that the project requires in `python`, and return their paths.

    Each round downloads the requirements of the last round's wheels. pip itself cannot resolve them: it
    evaluates markers for the Python that runs it.
    """
    environment = target_environment(python)
    exact = pins((ROOT / "constraints.txt").read_text().splitlines(), environment)
    asked: dict[str, set[str]] = {}
    wheels: dict[str, Path] = {}
    coming = [r for r in project_requirements() if applies(r, environment, set())]
    while coming:
        changed = set()
        for requirement in coming:
            name = canonicalize_name(requirement.name)
            extras = asked.get(name)
            if name not in OF_THE_MACHINE and (extras is None or not requirement.extras <= extras):
                asked[name] = requirement.extras | (extras or set())
                changed.add(name)
        if missing := changed - exact.keys():
            raise SystemExit(f"constraints.txt pins no version of {', '.join(sorted(missing))}")
        if new := changed - wheels.keys():
            download([exact[name] for name in sorted(new)], python, folder)
            wheels = {parse_wheel_filename(path.name)[0]: path for path in folder.glob("*.whl")}
        coming = [
            requirement
            for name in changed
            for requirement in requirements_of(wheels[name])
            if applies(requirement, environment, asked[name])
        ]
    return sorted(wheels.values())


def copy_project(folder: Path) -> None:
    """Copy the files that the tests and the benchmark need."""
    ignored = shutil.ignore_patterns("__pycache__", "results", ".*")
    for name in PROJECT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)


def main() -> None:
    """Build the kit; fail with its size if it exceeds `MAX_BYTES`."""
    parser = argparse.ArgumentParser(description="Build the GPU kit.")
    parser.add_argument("python", help="the version of the machine's Python: 3.12")
    python = parser.parse_args().python
    shutil.rmtree(KIT, ignore_errors=True)
    (KIT / "wheels").mkdir(parents=True)
    for wheel in collect_wheels(python, KIT / "wheels"):
        print(f"{wheel.stat().st_size / (1 << 20):7.2f} MiB  {wheel.name}")
    copy_project(KIT)
    archive = shutil.make_archive(f"{KIT}-{python}", "gztar", KIT.parent, KIT.name)
    size = Path(archive).stat().st_size
    print(f"{size / (1 << 20):7.2f} MiB  {Path(archive).relative_to(ROOT)}")
    if size > MAX_BYTES:
        raise SystemExit(f"The kit is {size:,} bytes; at most {MAX_BYTES:,} can be carried.")


if __name__ == "__main__":
    main()
