"""The system calls of the sandbox, compared with Docker's default seccomp profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndif.sandbox.confinement import seccomp
from tests.deploy.profiles import YOUNGER, docker_profile

pytestmark = pytest.mark.process

_NEEDED = """landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp prctl capset capget
    setrlimit prlimit64 clone fork memfd_create pidfd_open pidfd_send_signal socketpair setsid
    close_range"""
NEEDED = frozenset(_NEEDED.split())
"""System calls that the sandbox and the creation of runners need."""
DISPENSABLE = frozenset({"get_mempolicy"})
"""System calls that containers without CAP_SYS_NICE lack; libraries work without them."""


def test_oldest_docker_profile_allows_calls_of_sandbox(tmp_path: Path) -> None:
    profile = json.loads(docker_profile(tmp_path).read_text())
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and not (rule.get("includes") or {}).get("caps")
        for name in rule.get("names") or [rule["name"]]
    }
    assert NEEDED - allowed == set()
    assert {*seccomp._ALLOWED, *seccomp._FORKING.split()} - allowed <= DISPENSABLE | YOUNGER
