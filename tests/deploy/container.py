"""A container without an engine: mount and process namespaces, another root, another user, seccomp filters.

The container shares the machine's network, kernel and /usr; everything else comes from the image. It needs
root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyseccomp as seccomp

_USR = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
_SYSTEM = """\
mount --bind "$ROOT" "$ROOT"
mount --rbind /usr "$ROOT/usr"
mount -t proc proc "$ROOT/proc"
mount --rbind /dev "$ROOT/dev"
mount --rbind /sys "$ROOT/sys"
mount -t tmpfs -o mode=1777 tmpfs "$ROOT/tmp"
"""
_CONFINE = """\
import ctypes, os, sys
*files, mark = sys.argv[1 : sys.argv.index("--") + 1]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
for file in files:
    code = bytearray(open(file, "rb").read())
    held = (ctypes.c_char * len(code)).from_buffer(code)
    program = Program(len(code) // 8, ctypes.addressof(held))
    if ctypes.CDLL(None, use_errno=True).prctl(22, 2, ctypes.byref(program), 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
command = sys.argv[sys.argv.index("--") + 1 :]
os.execvp(command[0], command)
"""
"""Program that loads filters and then executes a command, to which they apply."""


@dataclass
class Root:
    """A folder that is a container's root. The caller of `make` has to `remove` it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    working_folder: str = "/"
    mounts: dict[Path, str] = field(default_factory=dict)
    """Mounts of every command in this root."""

    @classmethod
    def make(cls) -> Root:
        """Make an empty root with the machine's programs, and a copy of its /etc."""
        folder = Path(tempfile.mkdtemp(prefix="ndif-image-"))
        folder.chmod(0o755)
        for name in (
            "usr",
            "proc",
            "dev",
            "sys",
            "tmp",
            "root",
            "run",
            "var/lib",
            "var/cache",
            "opt",
        ):
            (folder / name).mkdir(parents=True)
        for name in _USR:
            if (link := Path("/", name)).is_symlink():
                (folder / name).symlink_to(link.readlink())
        subprocess.run(["cp", "-a", "/etc", folder], check=True)
        return cls(folder)

    def path(self, name: str) -> Path:
        """Return this machine's path of a path in the root."""
        return self.folder / name.lstrip("/")

    def popen(
        self,
        command: Sequence[str],
        *,
        user: str = "0:0",
        mounts: Mapping[Path, str] | None = None,
        variables: Mapping[str, str] | None = None,
        read_only: bool = False,
        filters: Iterable[Path] = (),
    ) -> subprocess.Popen[str]:
        """Start a command in new namespaces, as the first process of its process namespace.

        Args:
            command: The program and its arguments.
            user: Numbers of user and group; users other than root have no capability and gain none.
            mounts: Folders and files of this machine, with their paths in the root.
            variables: Variables in addition to the root's environment.
            read_only: Make everything read-only except the mounts.
            filters: Files of BPF programs, which are loaded before the command.
        """
        lines = [_SYSTEM]
        for source, target in {**self.mounts, **(mounts or {})}.items():
            place = self.path(target)
            if source.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            lines.append(f"mount --bind {shlex.quote(str(source))} {shlex.quote(str(place))}\n")
        if read_only:
            lines.append(
                'mount -o remount,bind,ro "$ROOT" && mount -o remount,bind,ro "$ROOT/usr"\n'
            )
        inner = ["chroot", str(self.folder), *_as_user(user)]
        programs = []
        for number, file in enumerate(filters):
            programs.append(f"/run/filter-{number}")
            shutil.copy(file, self.path(programs[-1]))
        if programs:
            inner += ["/python/bin/python", "-c", _CONFINE, *programs, "--"]
        inner += ["/usr/bin/env", "-C", self.working_folder, *command]
        lines.append(f"exec {shlex.join(inner)}\n")
        return subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", "".join(lines)],
            env={"ROOT": str(self.folder), **self.environment, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], **options: Any) -> str:
        """Run a command to its end; return its output."""
        process = self.popen(command, **options)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{shlex.join(command)}\n{output}"
        return output

    def remove(self) -> None:
        """Start the removal of the folder."""
        subprocess.Popen(["rm", "-rf", "--one-file-system", self.folder])


def inside(
    pid: int, root: Root, command: Sequence[str], user: str
) -> subprocess.CompletedProcess[str]:
    """Run a command beside the first process of a container, as `docker exec` does."""
    into = ["nsenter", f"--target={pid}", "--mount", "--pid", f"--root=/proc/{pid}/root"]
    return subprocess.run(
        [*into, *_as_user(user), "/usr/bin/env", "-C", root.working_folder, *command],
        env=root.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _as_user(user: str) -> list[str]:
    number, _, group = user.partition(":")
    if number == "0":
        return []
    return [
        *("setpriv", f"--reuid={number}", f"--regid={group}", "--clear-groups"),
        *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"),
    ]


def engine_filter(profile: Path, target: Path) -> Path:
    """Compile an engine's profile for a container without capabilities.

    containers-seccomp.json(5) describes the format.
    """
    described = json.loads(profile.read_text())
    rules = seccomp.SyscallFilter(seccomp.ERRNO(described.get("defaultErrnoRet", errno.EPERM)))
    comparisons = {"SCMP_CMP_MASKED_EQ": seccomp.MASKED_EQ, "SCMP_CMP_EQ": seccomp.EQ}
    comparisons |= {"SCMP_CMP_NE": seccomp.NE, "SCMP_CMP_LT": seccomp.LT}
    for rule in described["syscalls"]:
        if not _applies(rule):
            continue
        action = seccomp.ALLOW
        if rule["action"] == "SCMP_ACT_ERRNO":
            action = seccomp.ERRNO(rule.get("errnoRet", errno.EPERM))
        conditions = [
            seccomp.Arg(
                argument["index"],
                comparisons[argument["op"]],
                argument["value"],
                argument["valueTwo"],
            )
            if argument["op"] == "SCMP_CMP_MASKED_EQ" and "valueTwo" in argument
            else seccomp.Arg(argument["index"], comparisons[argument["op"]], argument["value"], 0)
            if argument["op"] == "SCMP_CMP_MASKED_EQ"
            else seccomp.Arg(argument["index"], comparisons[argument["op"]], argument["value"])
            for argument in rule.get("args") or []
        ]
        for name in rule.get("names") or [rule["name"]]:
            _add(rules, action, name, *conditions)
    return _export(rules, target)


def _applies(rule: Mapping[str, Any]) -> bool:
    """Return True if a rule holds on x86-64 for a container without capabilities on a newer kernel."""
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    arches = includes.get("arches")
    if includes.get("caps") or (arches and "amd64" not in arches):
        return False
    # For a call that needs a capability, Podman's profile has a second rule with another error number.
    return "amd64" not in (excludes.get("arches") or [])


def allow_list_filter(names: Iterable[str], target: Path) -> Path:
    """Compile a filter that allows these calls; other calls fail with EPERM, as with systemd."""
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in names:
        _add(rules, seccomp.ALLOW, name)
    return _export(rules, target)


def _add(rules: seccomp.SyscallFilter, action: int, name: str, *conditions: seccomp.Arg) -> None:
    try:
        rules.add_rule(action, name, *conditions)
    except OSError as error:
        # The call belongs to another architecture, or is newer than this libseccomp.
        if error.errno not in (errno.EDOM, errno.EINVAL, errno.EFAULT):
            raise


def _export(rules: seccomp.SyscallFilter, target: Path) -> Path:
    with target.open("wb") as file:
        rules.export_bpf(file)
    return target


def may_make() -> bool:
    """Return True if this user may make a container on this machine."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        clone_newns, clone_newpid = 0x00020000, 0x20000000
        child = os.fork()
        if child == 0:
            os._exit(ctypes.CDLL(None).unshare(clone_newns | clone_newpid) != 0)
        return os.waitpid(child, 0)[1] == 0
    return False
