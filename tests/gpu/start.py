"""Run the GPU suite in the project's environment; in an unpacked kit, first make it from the kit's wheels.

Usage: start.py, with any Python that has torch. In a checkout, `make gpu` makes the environment. Uses only
the standard library, and no network.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels"
ENVIRONMENT = ROOT / ".venv"
OF_THE_MACHINE = ("torch", "numpy")
_NDIF = """#!{python}
from ndif.cli.main import cli
cli()
"""


def folders_of_the_machine() -> list[Path]:
    """Return the folders of the packages that the machine provides.

    Raises:
        SystemExit: if this Python lacks one of them.
    """
    folders = []
    for name in OF_THE_MACHINE:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(
                f"{sys.executable} has no {name}. Run this with a Python that has: "
                "make gpu PYTHON=/path/to/python"
            )
        folders.append(Path(spec.origin).parents[1])
    return list(dict.fromkeys(folders))


def install(folders: list[Path]) -> None:
    """Make an environment from the kit's wheels that falls back to `folders`.

    Raises:
        SystemExit: if the wheels are for another Python.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    compiled = next(WHEELS.glob("pydantic_core-*"), None)
    if compiled is None or f"-cp{version.replace('.', '')}-" not in compiled.name:
        raise SystemExit(
            f"This kit is not of Python {version}. Build one: make gpu-kit PYTHON={version}"
        )
    # pip keeps existing files, also after an interrupted installation.
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
    packages = ENVIRONMENT / "lib" / f"python{version}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    subprocess.run([*pip, "--target", packages, *sorted(WHEELS.glob("*.whl"))], check=True)
    # These folders come last on the path: the kit's packages take precedence over the machine's.
    lines = [str(ROOT / "src"), *map(str, folders)]
    (packages / "zz_machine.pth").write_text("\n".join(lines) + "\n")
    program = ENVIRONMENT / "bin" / "ndif"
    program.write_text(_NDIF.format(python=ENVIRONMENT / "bin" / "python"))
    program.chmod(0o755)


def keep_bytecode() -> None:
    """Let Python keep compiled modules: where an image forbids it, each process compiles torch again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".cache" / "bytecode"))


def main() -> None:
    """Make an environment, and replace this process with the suite in it."""
    python = ENVIRONMENT / "bin" / "python"
    if WHEELS.is_dir():
        if not (ENVIRONMENT / "bin" / "ndif").exists():
            install(folders_of_the_machine())
        keep_bytecode()
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", "tests.gpu", *sys.argv[1:]])


if __name__ == "__main__":
    main()
