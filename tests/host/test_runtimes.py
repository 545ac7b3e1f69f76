from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import packaging
import pytest
from click.testing import CliRunner

import ndif
from ndif.cli.runtime import command
from ndif.host import installer as installer_module
from ndif.host import runtimes as runtimes_module
from ndif.host.installer import Installer, Package, Pip, Tell, Uv
from ndif.host.runtimes import (
    SUPPORTED,
    Runtimes,
    RuntimesError,
    generation_of,
    how_to_add,
    pins,
)

pytestmark = pytest.mark.process

Edit = Callable[[Path], None]


INSTALLERS: dict[str, type[Installer]] = {"uv": Uv, "pip": Pip}
INSTALLED = {"uv": "Installed 3 packages", "pip": "Successfully installed"}
NOT_FOUND = {"uv": "No solution found", "pip": "No matching distribution found"}


@pytest.fixture(scope="session", params=INSTALLERS)
def name(request: pytest.FixtureRequest) -> str:
    """The installer of a test's runtimes."""
    return str(request.param)


def install_by(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def by(action: Callable[[Installer], Path], tell: Tell) -> Path:
        return action(INSTALLERS[name]())

    monkeypatch.setattr(runtimes_module, "by_uv_or_pip", by)


@pytest.fixture
def installer(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    install_by(monkeypatch, name)
    return name


@pytest.fixture(scope="session")
def with_07(name: str, tmp_path_factory: pytest.TempPathFactory) -> Runtimes:
    """A folder with a real installation of 0.7."""
    runtimes = Runtimes(tmp_path_factory.mktemp("runtimes"))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        install_by(monkeypatch, name)
        runtime = runtimes.add("0.7", lines.append)
    assert (runtime.generation, generation_of(runtime.version)) == ("0.7", "0.7")
    assert any(line.startswith(INSTALLED[name]) for line in lines)
    return runtimes


@pytest.fixture
def own_07(with_07: Runtimes, installer: str, tmp_path: Path) -> Runtimes:
    """A copy of `with_07` that a test may change, with the same installer."""
    folder = tmp_path / "runtimes"
    shutil.copytree(with_07.folder, folder, copy_function=os.link)
    return Runtimes(folder)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide all packages from the real installers."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def ignore(line: str) -> None:
    """Ignore the output of an installer."""


def python(runtime_path: tuple[Path, ...], code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, runtime_path))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize(
    ("version", "generation"),
    [
        ("0.8.1", "0.8"),
        ("0.8", "0.8"),
        ("0.7.0.dev3", "0.7"),
        ("0.8.1+local", "0.8"),
        ("0.6.3rc1", "0.6"),
        ("10.12.1", "10.12"),
        ("1", None),
        ("", None),
        ("latest", None),
        ("0.8.x", None),
        ("../0.7", None),
        (f"0.{'9' * 5000}", None),
    ],
)
def test_generation_is_derived_from_version(version: str, generation: str | None) -> None:
    assert generation_of(version) == generation


def test_folder_without_runtimes_lists_only_base_nnsight(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        installed = Runtimes(folder).installed()
        assert list(installed) == ["0.8"]
        assert installed["0.8"].version == metadata.version("nnsight")
        assert installed["0.8"].path == ()
        assert installed["0.8"].interpreter == Path(sys.executable)


def test_listing_runtimes_does_not_import_nnsight(with_07: Runtimes) -> None:
    code = (
        "import sys; from pathlib import Path; from ndif.host.runtimes import Runtimes;"
        f"print(*Runtimes(Path({str(with_07.folder)!r})).installed());"
        "assert not {'nnsight', 'torch'} & set(sys.modules)"
    )
    assert python((Path(ndif.__file__).parents[1],), code) == "0.8 0.7"


def test_added_runtime_brings_its_nnsight_and_shares_torch(with_07: Runtimes) -> None:
    runtime = with_07.installed()["0.7"]
    assert runtime.path == (with_07.folder / "0.7",)
    code = "import nnsight, torch; print(nnsight.__version__, torch.__file__)"
    version, torch = python(runtime.path, code).split()
    assert version == runtime.version
    assert generation_of(version) == "0.7"
    assert not Path(torch).is_relative_to(with_07.folder)
    assert not (runtime.path[0] / "torch").exists()
    assert not (runtime.path[0] / "transformers").exists()
    # The base is unchanged.
    assert generation_of(python((), "import nnsight; print(nnsight.__version__)")) == "0.8"


def test_adding_leaves_only_runtime_and_lock(with_07: Runtimes) -> None:
    assert sorted(path.name for path in with_07.folder.iterdir()) == [".lock", "0.7"]


def drop_metadata(overlay: Path) -> None:
    shutil.rmtree(next(overlay.glob("nnsight-*.dist-info")))


def drop_package(overlay: Path) -> None:
    shutil.rmtree(overlay / "nnsight")


def drop_one_file(overlay: Path) -> None:
    next((overlay / "nnsight").rglob("globals.py")).unlink()


def drop_record(overlay: Path) -> None:
    next(overlay.glob("nnsight-*.dist-info/RECORD")).unlink()


def leave_unfinished(overlay: Path) -> None:
    overlay.rename(overlay.with_name(".unfinished-abc"))


def misname(overlay: Path) -> None:
    overlay.rename(overlay.with_name("0.6"))


def age(overlay: Path) -> None:
    wheel = next(overlay.glob("nnsight-*.dist-info/WHEEL"))
    text = wheel.read_text().replace("cp3", "cp2")
    wheel.unlink()  # it is a link to the shared one
    wheel.write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        drop_metadata,
        drop_package,
        drop_one_file,
        drop_record,
        leave_unfinished,
        misname,
        age,
    ],
)
def test_incomplete_runtime_is_not_listed(own_07: Runtimes, spoil: Edit) -> None:
    assert list(own_07.installed()) == ["0.8", "0.7"]
    spoil(own_07.folder / "0.7")
    assert list(own_07.installed()) == ["0.8"]


def test_missing_bytecode_does_not_make_runtime_incomplete(own_07: Runtimes) -> None:
    for cache in list((own_07.folder / "0.7" / "nnsight").rglob("__pycache__")):
        shutil.rmtree(cache)
    assert "0.7" in own_07.installed()


def test_adding_replaces_incomplete_runtime(own_07: Runtimes) -> None:
    drop_package(own_07.folder / "0.7")
    left = own_07.folder / ".unfinished-killed"
    left.mkdir()
    assert own_07.add("0.7", ignore).generation == "0.7"
    assert list(own_07.installed()) == ["0.8", "0.7"]
    assert not left.exists()


def test_adding_twice_explains_reinstallation(with_07: Runtimes) -> None:
    with pytest.raises(RuntimesError, match=r"already installed in .*ndif runtime remove 0\.7"):
        with_07.add("0.7", ignore)


def test_base_runtime_cannot_be_added_or_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimesError, match="ndif is installed with it"):
        Runtimes(tmp_path).add("0.8", ignore)
    with pytest.raises(RuntimesError, match="only runtimes that were added can be removed"):
        Runtimes(tmp_path).remove("0.8")


@pytest.mark.parametrize("generation", ["0.5", "nonsense", "../0.7", ""])
def test_unknown_generation_error_lists_supported_generations(
    tmp_path: Path, generation: str
) -> None:
    with pytest.raises(RuntimesError) as caught:
        Runtimes(tmp_path).add(generation, ignore)
    assert all(supported in str(caught.value) for supported in SUPPORTED)
    with pytest.raises(RuntimesError, match=r"installed: 0\.8"):
        Runtimes(tmp_path).remove(generation)


def test_remove_deletes_runtime_once(own_07: Runtimes) -> None:
    own_07.remove("0.7")
    assert list(own_07.installed()) == ["0.8"]
    assert [path.name for path in own_07.folder.iterdir()] == [".lock"]
    with pytest.raises(RuntimesError, match="to remove"):
        own_07.remove("0.7")


@pytest.mark.usefixtures("no_index")
def test_failed_installation_quotes_installer_and_leaves_no_files(
    tmp_path: Path, installer: str
) -> None:
    lines: list[str] = []
    with pytest.raises(RuntimesError, match=NOT_FOUND[installer]):
        Runtimes(tmp_path).add("0.6", lines.append)
    assert any(NOT_FOUND[installer] in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


class Copying(Installer):
    """An installer that copies a folder, whole or as it is."""

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source

    def missing(self, requirements: Sequence[str], tell: Tell) -> list[Package]:
        return [Package("nnsight", "0.7.0")]

    def install_into(self, folder: Path, packages: Sequence[str], tell: Tell) -> None:
        shutil.copytree(self.source, folder, copy_function=os.link)

    def run(self, arguments: Sequence[str], tell: Tell) -> None:
        raise AssertionError


def test_pip_installs_runtime_that_uv_left_incomplete(
    own_07: Runtimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, whole = tmp_path / "half", own_07.folder / "0.7"
    shutil.copytree(whole, half, ignore=shutil.ignore_patterns("modeling"))
    monkeypatch.undo()
    monkeypatch.setattr(installer_module, "Uv", lambda: Copying("uv", half))
    monkeypatch.setattr(installer_module, "Pip", lambda: Copying("pip", whole))
    lines: list[str] = []
    added = Runtimes(tmp_path / "added").add("0.7", lines.append)
    assert (added.path[0] / "nnsight" / "modeling").is_dir()
    assert lines == [
        "Looking for nnsight>=0.7,<0.8",
        "uv installed nnsight==0.7.0, which is incomplete: pip installs instead, "
        "which takes longer",
        "Looking for nnsight>=0.7,<0.8",
    ]


def test_concurrent_change_of_runtimes_is_rejected(own_07: Runtimes) -> None:
    with (own_07.folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimesError, match="wait until it is done"):
            own_07.add("0.6", ignore)
        with pytest.raises(RuntimesError, match="wait until it is done"):
            own_07.remove("0.7")
    own_07.remove("0.7")


def test_runtime_with_its_own_torch_is_rejected() -> None:
    nnsight, torch = Package("nnsight", "0.7.0"), Package("Torch", "2.14.0")
    assert pins([nnsight], "pip") == ["nnsight==0.7.0"]
    with pytest.raises(RuntimesError, match=r"pip would bring Torch 2\.14\.0"):
        pins([nnsight, torch], "pip")


def test_environment_without_installers_is_reported(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "packaging").symlink_to(Path(packaging.__file__).parent)
    (libraries / "ndif").symlink_to(Path(ndif.__file__).parent)
    code = (
        "from pathlib import Path; from ndif.host.runtimes import Runtimes;"
        f"Runtimes(Path({str(tmp_path / 'runtimes')!r})).add('0.7', print)"
    )
    run = subprocess.run(
        [venv / "bin" / "python", "-c", code],
        env={"PYTHONPATH": str(libraries), "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"installed with uv or pip, and {venv} has neither" in run.stderr
    assert "ensurepip" in run.stderr


class TestCommandLine:
    """`ndif runtime`."""

    @pytest.fixture(autouse=True)
    def _folder(self, own_07: Runtimes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NDIF_RUNTIMES_DIR", str(own_07.folder))

    def run(self, *arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(command, arguments)
        return result.exit_code, result.output

    def test_list_shows_installed_and_available_runtimes(self) -> None:
        code, output = self.run("list")
        assert code == 0
        assert metadata.version("nnsight") in output
        assert "installed with ndif" in output
        assert "ndif runtime add 0.6" in output
        assert "ndif runtime add 0.7" not in output

    def test_list_prints_json(self, own_07: Runtimes) -> None:
        code, output = self.run("list", "--json")
        assert code == 0
        rows = {row["generation"]: row for row in json.loads(output)}
        assert list(rows) == ["0.8", "0.7", "0.6"]
        assert rows["0.8"]["path"] == []
        assert rows["0.7"]["path"] == [str(own_07.folder / "0.7")]
        assert rows["0.7"]["interpreter"] == sys.executable
        assert rows["0.7"]["install"] is None
        assert rows["0.6"]["version"] is None
        assert rows["0.6"]["install"] == "ndif runtime add 0.6"

    def test_remove_and_add_accept_version(self, own_07: Runtimes, installer: str) -> None:
        code, output = self.run("remove", "0.7.0")
        assert (code, output) == (0, "nnsight 0.7 is removed\n")
        code, output = self.run("add", "0.7.0")
        assert code == 0
        assert INSTALLED[installer] in output
        assert output.splitlines()[-1].endswith(f"is installed in {own_07.folder / '0.7'}")
        code, output = self.run("remove", "0.7", "--json")
        assert (code, json.loads(output)) == (0, {"removed": "0.7"})
        code, output = self.run("add", "0.7", "--json")
        assert code == 0
        assert json.loads(output.splitlines()[-1])["path"] == [str(own_07.folder / "0.7")]
        code, output = self.run("add", "0.7")
        assert code == 1
        assert "Error: nnsight 0.7" in output

    def test_errors_are_printed_with_exit_code_1(self) -> None:
        code, output = self.run("add", "0.5.2")
        assert (code, output) == (
            1,
            "Error: there is no runtime '0.5'; ndif serves nnsight 0.8, 0.7, 0.6\n",
        )
        code, output = self.run("remove", "0.8")
        assert code == 1
        assert output.startswith("Error: nnsight 0.8")


def test_how_to_add_lists_supported_generations_for_unknown_one() -> None:
    assert how_to_add("0.7") == "`ndif runtime add 0.7` adds it."
    assert how_to_add("0.9") == "ndif serves nnsight 0.8, 0.7, 0.6."
