"""Commands that install missing packages into the environment of this program."""

from __future__ import annotations

import sys

import pytest

from ndif import distribution
from ndif.distribution import install_command


def test_install_command_targets_running_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pip = f"{sys.executable} -m pip install"
    assert install_command("redis", "nnsight") == f"{pip} 'redis>=7' 'nnsight<0.9,>=0.8'"
    assert install_command("unknown") == f"{pip} unknown"
    # uv creates environments without pip.
    monkeypatch.setattr(distribution, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "executable", "/my tools/bin/python")
    assert install_command("redis") == "uv pip install --python '/my tools/bin/python' 'redis>=7'"
