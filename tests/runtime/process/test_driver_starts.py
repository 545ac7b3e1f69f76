"""A GPU driver starts in a confined runner, thanks to one fix for each action of its start.

The table has a row for each action of a stand-in driver, and a column for the code without each fix.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.process import pretend_driver
from tests.runtime.process.pretend_driver import (
    ACTS,
    CUSTODY,
    EVENT,
    FILES,
    MEMORY_FILE,
    THREAD_NAME,
    VARIABLES,
    PretendDriver,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]
AS_IT_IS, WITHOUT_ANY = "as it is", "without any"
COLUMNS = [AS_IT_IS, *map(str, ACTS), WITHOUT_ANY]


@pytest.fixture(scope="module")
def table(tiny_gpt2: Path) -> dict[str, dict[str, str]]:
    """Outcomes by column and row: empty if the runner starts, otherwise the reason."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.process.test_driver_starts", tiny_gpt2],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-of-the-replica", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    columns: dict[str, dict[str, str]] = json.loads(run.stdout.splitlines()[-1])
    return columns


@pytest.mark.parametrize("act", ACTS, ids=ACTS.values())
def test_a_confined_runner_starts_whatever_its_driver_does(
    table: dict[str, dict[str, str]], act: int
) -> None:
    assert table[AS_IT_IS][str(act)] == ""


@pytest.mark.parametrize("mend", ACTS, ids=ACTS.values())
def test_reverting_one_fix_breaks_only_its_driver_act(
    table: dict[str, dict[str, str]], mend: int
) -> None:
    failed = {row for row, why in table[str(mend)].items() if why}
    assert failed == {str(mend)}


def test_without_any_fix_no_driver_starts(table: dict[str, dict[str, str]]) -> None:
    assert all("Bad file descriptor" in why for why in table[WITHOUT_ANY].values())


# The program that makes the table: a zygote for each column, and one of its runners for each row.


def without_custody(driver: PretendDriver) -> None:
    """Close the channel to the owner only once its descriptor number may be reused."""
    from ndif.runtime.process.weight_owner import WeightOwnerClient

    start, leave = WeightOwnerClient.start, WeightOwnerClient.leave_to_parent

    def start_and_close(weight_owner: WeightOwnerClient) -> None:
        weight_owner._channel.socket.close()
        start(weight_owner)

    def leave_late(weight_owner: WeightOwnerClient) -> None:
        if CUSTODY not in driver.acts:
            leave(weight_owner)

    WeightOwnerClient.start, WeightOwnerClient.leave_to_parent = start_and_close, leave_late  # type: ignore[method-assign]


def without_thread_names(_: PretendDriver) -> None:
    from ndif.sandbox.confinement import landlock

    create = landlock.create_ruleset
    landlock.create_ruleset = lambda readable, writable, *_: create(readable, writable)


def without_plain_handles(_: PretendDriver) -> None:
    pretend_driver.without_event = lambda handle: handle


def without_late_limits(_: PretendDriver) -> None:
    from ndif.sandbox.confinement.confinement import Confinement

    drop = Confinement._drop_privileges

    def limit_and_drop(confinement: Confinement) -> None:
        confinement._limit(None)
        drop(confinement)

    Confinement._drop_privileges = limit_and_drop  # type: ignore[method-assign]


def without_variables(_: PretendDriver) -> None:
    from ndif.sandbox.confinement import confinement

    confinement.driver_variables = dict


def without_folders(driver: PretendDriver) -> None:
    files = driver.files

    def devices_alone(*asked: Any) -> Any:
        from dataclasses import replace

        return replace(files(*asked), libraries=())

    driver.files = devices_alone  # type: ignore[method-assign]


REVERSIONS: dict[int, Callable[[PretendDriver], None]] = {
    CUSTODY: without_custody,
    THREAD_NAME: without_thread_names,
    EVENT: without_plain_handles,
    MEMORY_FILE: without_late_limits,
    VARIABLES: without_variables,
    FILES: without_folders,
}


def column(checkpoint: Path, reverted: list[int]) -> dict[str, str]:
    """Return the outcome of a runner for each act of the driver."""
    from ndif.runtime.frames import FrameChannel
    from ndif.runtime.process.zygote import Zygote
    from ndif.runtime.spec import ModelSpec, UntrustedSettings

    with tempfile.TemporaryDirectory() as folder:
        driver = PretendDriver(Path(folder))
        for mend in reverted:
            REVERSIONS[mend](driver)
        untrusted = UntrustedSettings(
            "require", False, None, 1 << 30, 1 << 20, 64, f"{folder}/adapters"
        )
        spec = ModelSpec(
            str(checkpoint), "0.8", task="text-generation", threads=1, untrusted=untrusted
        )
        host, control = socket.socketpair()
        zygote = Zygote(FrameChannel(control), spec, driver)
        rows = {}
        for act in ACTS:
            # Without any fix, the channel to the owner is always open.
            driver.acts = {act, CUSTODY} if len(reverted) > 1 else {act}
            rows[str(act)] = outcome(zygote)
        owner = zygote._weight_owner.owner if zygote._weight_owner else None
        assert owner is not None
        host.close()
        control.close()
        os.kill(owner, 9)
        os.waitpid(owner, 0)
        return rows


def outcome(zygote: Any) -> str:
    """Return "" if a new runner waits for a request, otherwise the reason."""
    from ndif.runtime.frames import FrameChannel
    from ndif.runtime.messages import Signal

    own, other = socket.socketpair()
    own.settimeout(PATIENCE_S)
    zygote._fork("runner", other.detach(), fresh=True, reused=False)
    (pid,) = zygote._runners
    try:
        message, body, _ = FrameChannel(own).receive()
        return "" if message is Signal.IDLE else bytes(body).decode()
    except EOFError:
        return "the runner ended"
    finally:
        own.close()
        os.waitpid(pid, 0)
        zygote._runners.clear()


def in_a_fork(run: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return the result of `run` in a forked process that leaves nothing behind."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    outcomes: dict[str, str] = json.loads(content)
    return outcomes


def main() -> None:
    checkpoint = Path(sys.argv[1])
    # In this process, so that the forks inherit its imports.
    columns = {AS_IT_IS: column(checkpoint, [])}
    for name, mends in {**{str(mend): [mend] for mend in ACTS}, WITHOUT_ANY: [*ACTS]}.items():
        columns[name] = in_a_fork(lambda mends=mends: column(checkpoint, mends))  # type: ignore[misc]
    for act, explanation in ACTS.items():
        cells = ["-" if columns[name][str(act)] else "ok" for name in COLUMNS]
        print(f"{act} {explanation:56}", *(f"{cell:12}" for cell in cells), file=sys.stderr)
    print(json.dumps(columns))


if __name__ == "__main__":
    main()
