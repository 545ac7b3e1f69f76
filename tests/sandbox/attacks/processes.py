"""Attacks on processes: starting them and harming other users' processes; calls that change the machine.

Calls that would change this machine have an argument that the kernel refuses only after its permission
check. Any error but EPERM, ENOSYS and EACCES means that the call was served.
"""

from __future__ import annotations

# Starting processes


def forks() -> object:
    """os.fork"""
    import os
    import time

    if os.fork() == 0:
        time.sleep(1.2)
        os._exit(0)
    time.sleep(1)
    return True


def forks_a_terminal() -> object:
    """os.forkpty"""
    import os
    import time

    if os.forkpty()[0] == 0:
        time.sleep(1.2)
        os._exit(0)
    time.sleep(1)
    return True


def forks_by_number() -> object:
    """fork by number"""
    import ctypes
    import os
    import time

    if ctypes.CDLL(None).syscall(57) == 0:
        time.sleep(1.2)
        os._exit(0)
    time.sleep(1)
    return True


def clones() -> object:
    """clone by number"""
    import ctypes
    import os
    import time

    if ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) == 0:
        time.sleep(1.2)
        os._exit(0)
    time.sleep(1)
    return True


def clones_anew() -> object:
    """clone3, whose flags are invisible to filters"""
    import ctypes
    import os
    import time

    arguments = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17, 0, 0, 0)
    if ctypes.CDLL(None).syscall(435, arguments, 64) == 0:
        time.sleep(1.2)
        os._exit(0)
    time.sleep(1)
    return True


def becomes_a_daemon() -> object:
    """two forks and a new session, to outlive the request"""
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1.4)
        os._exit(0)
    time.sleep(1)
    return True


def forks_with_multiprocessing() -> object:
    """multiprocessing"""
    import multiprocessing
    import time

    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1,))
    process.start()
    process.join()
    return True


def forks_with_torch() -> object:
    """torch.multiprocessing"""
    import time

    import torch

    process = torch.multiprocessing.get_context("fork").Process(target=time.sleep, args=(1,))
    process.start()
    process.join()
    return True


def forks_with_a_data_loader() -> object:
    """a DataLoader with workers"""
    import time

    import torch

    batches = iter(torch.utils.data.DataLoader([torch.zeros(1)] * 400, num_workers=1))
    first = next(batches)
    time.sleep(1)
    return first


def forks_with_a_changed_data_loader() -> object:
    """a DataLoader whose workers are set after its creation"""
    import time

    import torch

    loader = torch.utils.data.DataLoader([torch.zeros(1)] * 400)
    loader.num_workers, loader.prefetch_factor = 1, 2
    batches = iter(loader)  # its worker ends with it
    first = next(batches)
    time.sleep(1)
    return first


def forks_below_a_data_loader() -> object:
    """a subclass of DataLoader that calls a private method of its base"""
    import time

    import torch

    class Loader(torch.utils.data.DataLoader):
        def _get_iterator(self) -> object:
            self.num_workers, self.prefetch_factor = 1, 2
            return super()._get_iterator()

    batches = iter(Loader([torch.zeros(1)] * 400))  # its worker ends with it
    first = next(batches)
    time.sleep(1)
    return first


def forks_with_a_data_loaders_context() -> object:
    """the multiprocessing context that a DataLoader keeps"""
    import time

    import torch

    loader = torch.utils.data.DataLoader([1], num_workers=1, multiprocessing_context="fork")
    process = loader.multiprocessing_context.Process(target=time.sleep, args=(1,))
    process.start()
    process.join()
    return True


def runs_a_program(token: str) -> object:
    """subprocess, which uses vfork"""
    import subprocess

    return subprocess.run(["sh", "-c", f"sleep 1; : {token}"], check=False).returncode


def runs_a_shell(token: str) -> object:
    """os.system"""
    import os

    return os.system(f"sleep 1; : {token}")


def runs_a_pipe(token: str) -> object:
    """os.popen"""
    import os

    return os.popen(f"sleep 1; : {token}").read()


def spawns(token: str) -> object:
    """os.posix_spawn"""
    import os

    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep 1; : {token}"], {})
    return os.waitpid(pid, 0)


def becomes_a_program(token: str) -> object:
    """os.execv: the runner becomes another program and keeps its open files"""
    import os

    return os.execv("/bin/sh", ["sh", "-c", f"sleep 1; : {token}"])


def becomes_a_program_by_number(token: str) -> object:
    """execveat by number"""
    import ctypes

    arguments = (ctypes.c_char_p * 4)(b"sh", b"-c", f"sleep 1; : {token}".encode(), None)
    return ctypes.CDLL(None).syscall(322, -100, b"/bin/sh", arguments, None, 0)


def runs_from_memory(token: str) -> object:
    """a program without a file: memfd and exec"""
    import os

    fd = os.memfd_create("program")
    with open("/bin/sh", "rb") as shell:  # noqa: PTH123 - as an attacker would
        os.write(fd, shell.read())
    return os.execve(fd, ["sh", "-c", f"sleep 1; : {token}"], {})


# Harming others


def kills(victim_pid: int) -> object:
    """SIGKILL"""
    import os

    return os.kill(victim_pid, 9)


def stops(victim_pid: int) -> object:
    """SIGSTOP"""
    import os

    return os.kill(victim_pid, 19)


def kills_a_group(victim_pid: int) -> object:
    """killpg"""
    import os

    return os.killpg(victim_pid, 9)


def kills_by_number(victim_pid: int) -> object:
    """kill by number, in the 32-bit table as well"""
    import ctypes

    return ctypes.CDLL(None).syscall(62, victim_pid, 9)


def kills_a_thread(victim_pid: int) -> object:
    """tgkill and tkill"""
    import ctypes

    libc = ctypes.CDLL(None)
    return libc.syscall(234, victim_pid, victim_pid, 9), libc.syscall(200, victim_pid, 9)


def queues_a_signal(victim_pid: int) -> object:
    """rt_sigqueueinfo and rt_tgsigqueueinfo"""
    import ctypes

    libc = ctypes.CDLL(None)
    # signal, errno, and a code of a user's: SI_QUEUE
    info = ctypes.create_string_buffer((9).to_bytes(4, "little") + bytes(4) + b"\xff" * 4, 128)
    first = libc.syscall(129, victim_pid, 9, info)
    return first, libc.syscall(297, victim_pid, victim_pid, 9, info)


def kills_by_descriptor(victim_pid: int) -> object:
    """pidfd_open and pidfd_send_signal"""
    import ctypes

    libc = ctypes.CDLL(None)
    return libc.syscall(424, libc.syscall(434, victim_pid, 0), 9, None, 0)


def kills_through_an_owner(victim_pid: int) -> object:
    """F_SETOWN: the kernel sends the signal to another process"""
    import fcntl
    import os
    import socket

    receiver, other = socket.socketpair()
    fcntl.fcntl(receiver, fcntl.F_SETOWN, victim_pid)
    fcntl.fcntl(receiver, 10, 9)  # F_SETSIG
    fcntl.fcntl(receiver, fcntl.F_SETFL, os.O_ASYNC)
    return other.send(b"now")


def kills_through_its_memory_score(victim_pid: int) -> object:
    """oom_score_adj: the first to be killed"""
    with open(f"/proc/{victim_pid}/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")
    return True


def traces(victim_pid: int) -> object:
    """ptrace: attach"""
    import ctypes
    import time

    answer = ctypes.CDLL(None).ptrace(16, victim_pid, 0, 0)
    time.sleep(0.1)
    return answer


def seizes(victim_pid: int) -> object:
    """ptrace: seize, which does not stop the process"""
    import ctypes

    return ctypes.CDLL(None).ptrace(0x4206, victim_pid, 0, 0)


def reads_memory(victim_pid: int, victim_address: int) -> object:
    """process_vm_readv"""
    import ctypes

    content = ctypes.create_string_buffer(64)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(content), 64)
    remote = (ctypes.c_uint64 * 2)(victim_address, 64)
    ctypes.CDLL(None).process_vm_readv(victim_pid, local, 1, remote, 1, 0)
    return content.raw


def writes_memory(victim_pid: int, victim_address: int) -> object:
    """process_vm_writev"""
    import ctypes

    content = ctypes.create_string_buffer(b"croaks")
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(content), 6)
    remote = (ctypes.c_uint64 * 2)(victim_address, 6)
    return ctypes.CDLL(None).process_vm_writev(victim_pid, local, 1, remote, 1, 0)


def reads_memory_file(victim_pid: int, victim_address: int) -> object:
    """/proc/PID/mem"""
    import os

    return os.pread(os.open(f"/proc/{victim_pid}/mem", os.O_RDONLY), 64, victim_address)


def writes_memory_file(victim_pid: int, victim_address: int) -> object:
    """/proc/PID/mem for writing"""
    import os

    return os.pwrite(os.open(f"/proc/{victim_pid}/mem", os.O_RDWR), b"croaks", victim_address)


def reads_environment(victim_pid: int) -> object:
    """/proc/PID/environ"""
    return open(f"/proc/{victim_pid}/environ").read()  # noqa: PTH123


def changes_priority(victim_pid: int) -> object:
    """setpriority"""
    import os

    return os.setpriority(os.PRIO_PROCESS, victim_pid, 10)


def changes_affinity(victim_pid: int) -> object:
    """sched_setaffinity"""
    import os

    return os.sched_setaffinity(victim_pid, {min(os.sched_getaffinity(victim_pid))})


def changes_schedule(victim_pid: int) -> object:
    """sched_setscheduler"""
    import os

    return os.sched_setscheduler(victim_pid, os.SCHED_IDLE, os.sched_param(0))


def changes_schedule_by_number(victim_pid: int) -> object:
    """sched_setattr, which does the work of three others"""
    import ctypes
    import struct

    attributes = struct.pack("<IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0)
    return ctypes.CDLL(None).syscall(314, victim_pid, attributes, 0)


def changes_io_priority(victim_pid: int) -> object:
    """ioprio_set"""
    import ctypes

    return ctypes.CDLL(None).syscall(251, 1, victim_pid, 3 << 13)


def changes_limits(victim_pid: int) -> object:
    """prlimit"""
    import resource

    return resource.prlimit(victim_pid, resource.RLIMIT_NOFILE, (7, 7))


# Other attacks, in a harmless form


def kills_everybody() -> object:
    """kill of -1, with signal 0, which only checks permission"""
    import os

    os.kill(-1, 0)
    return "REACHED"


def kills_the_zygote(zygote_pid: int) -> object:
    """kill of the process that holds the model, with signal 0"""
    import os

    os.kill(zygote_pid, 0)
    return "REACHED"


def kills_the_server(server_pid: int) -> object:
    """kill of the server, with signal 0"""
    import os

    os.kill(server_pid, 0)
    return "REACHED"


def takes_a_descriptor(server_pid: int) -> object:
    """pidfd_getfd: a copy of one of the server's descriptors"""
    import ctypes

    libc = ctypes.CDLL(None)
    fd = libc.syscall(438, libc.syscall(434, server_pid, 0), 0, 0)
    return f"REACHED {fd}" if fd >= 0 else "refused"


def opens_a_process(server_pid: int) -> object:
    """pidfd_open of the server"""
    import ctypes

    fd = ctypes.CDLL(None).syscall(434, server_pid, 0)
    return f"REACHED {fd}" if fd >= 0 else "refused"


def compares_processes(server_pid: int, zygote_pid: int) -> object:
    """kcmp: resources that two processes share"""
    import ctypes

    answer = ctypes.CDLL(None).syscall(312, server_pid, zygote_pid, 1, 0, 0)
    return f"REACHED {answer}" if answer >= 0 else "refused"


def moves_memory(server_pid: int) -> object:
    """move_pages of the server"""
    import ctypes

    answer = ctypes.CDLL(None).syscall(279, server_pid, 0, None, None, None, 0)
    return f"REACHED {answer}" if answer >= 0 else "refused"


def outlives_its_parent() -> object:
    """prctl: no signal when the process that holds the model ends"""
    import ctypes

    return "REACHED" if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0 else "refused"


def changes_personality() -> object:
    """personality: memory at fixed addresses"""
    import ctypes

    answer = ctypes.CDLL(None).personality(0x0040000)
    return f"REACHED {answer}" if answer >= 0 else "refused"


def makes_a_namespace() -> object:
    """unshare of a user namespace, which grants every capability; with these flags it fails with EINVAL"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x1)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def clones_into_a_namespace() -> object:
    """clone with CLONE_NEWUSER and contradictory flags"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(56, 0x10000000 | 0x200 | 17, 0, 0, 0, 0)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def enters_a_namespace() -> object:
    """setns"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(308, 0, 0)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def mounts(missing: str) -> object:
    """mount and fsopen"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(b"none", missing.encode(), b"tmpfs", 0, None)
    older = ctypes.get_errno()
    fd = libc.syscall(430, b"tmpfs", 0)
    refused = older in (1, 13, 38) and fd < 0
    return "refused" if refused else f"REACHED {older} {fd}"


def unmounts(missing: str) -> object:
    """umount2"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.umount2(missing.encode(), 0)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def copies_a_mount(model_folder: str) -> object:
    """open_tree: a copy of a mount"""
    import ctypes

    fd = ctypes.CDLL(None).syscall(428, -100, model_folder.encode(), 1)
    return f"REACHED {fd}" if fd >= 0 else "refused"


def changes_root(missing: str) -> object:
    """chroot and pivot_root"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    libc.chroot(missing.encode())
    errors.append(ctypes.get_errno())
    libc.syscall(155, missing.encode(), missing.encode())
    errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def becomes_another_user() -> object:
    """setuid and similar calls, with an impossible user"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    for number in (105, 106, 113, 114):
        libc.syscall(number, -1, -1)
        errors.append(ctypes.get_errno())
    libc.syscall(116, 1 << 20, 0)
    errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def keeps_capabilities() -> object:
    """remaining capabilities, by /proc"""
    with open("/proc/self/status") as file:  # noqa: PTH123
        lines = [line.split() for line in file if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
    return f"REACHED {lines}" if any(int(line[1], 16) for line in lines) else "none"


def counts_capabilities() -> object:
    """remaining capabilities, by capget"""
    import ctypes

    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capget(header, sets)
    return f"REACHED {list(sets)}" if any(sets) else "none"


def gains_privileges() -> object:
    """an unset no_new_privs: programs may still grant privileges"""
    import ctypes

    return "REACHED" if ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0 else "never"


def keeps_keys() -> object:
    """keyctl, add_key and request_key"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    for number in (250, 248, 249):
        libc.syscall(number, 9999, 0, 0, 0, 0)
        errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def loads_into_the_kernel() -> object:
    """bpf: programs in the kernel"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(321, 9999, None, 0)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def counts_events() -> object:
    """perf_event_open"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(298, None, 0, -1, -1, 0)
    return "refused" if ctypes.get_errno() in (1, 13, 38) else f"REACHED {ctypes.get_errno()}"


def handles_page_faults() -> object:
    """userfaultfd, with which kernel exploits win races"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(323, 1)
    return f"REACHED {fd}" if fd >= 0 or ctypes.get_errno() not in (1, 13, 38) else "refused"


def makes_a_ring() -> object:
    """io_uring_setup, which bypasses system call filters"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    return f"REACHED {fd}" if fd >= 0 else "refused"


def takes_the_machine() -> object:
    """reboot, kexec, modules and hardware ports, each with invalid arguments"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    calls = ((169, 1, 2, 3, 0), (246, 0, 0, 0, 0x7777), (313, -1, 0, 0x7777, 0))
    errors = []
    for call in (
        *calls,
        (175, 0, 0, 0, 0),
        (176, b"no-such-module", 0x800, 0, 0),
        (172, 7, 0, 0, 0),
    ):
        libc.syscall(*call)
        errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def renames_the_machine() -> object:
    """sethostname and setdomainname, with an invalid length"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    for number in (170, 171):
        libc.syscall(number, b"", -1)
        errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def changes_the_time() -> object:
    """settimeofday and clock_settime, with an invalid time"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    never = (ctypes.c_int64 * 2)(-1, -1)
    errors = []
    libc.syscall(164, never, None)
    errors.append(ctypes.get_errno())
    libc.syscall(227, 0, never)
    errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def swaps(missing: str) -> object:
    """swapon, swapoff and acct of a missing file"""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    for number in (167, 168, 163):
        libc.syscall(number, missing.encode(), 0)
        errors.append(ctypes.get_errno())
    return "refused" if {*errors} <= {1, 13, 38} else f"REACHED {errors}"


def reads_the_kernels_log() -> object:
    """syslog: the size of the kernel's log"""
    import ctypes

    answer = ctypes.CDLL(None).klogctl(10, None, 0)
    return f"REACHED {answer}" if answer >= 0 else "refused"


# Kernel objects of other processes


def reads_shared_memory(key: int) -> object:
    """shmget and shmat"""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(key, 0, 0)
    return "none" if number < 0 else ctypes.string_at(libc.shmat(number, None, 0x1000), 64)


def sets_a_semaphore(key: int) -> object:
    """semget and semctl"""
    import ctypes

    libc = ctypes.CDLL(None)
    return libc.semctl(libc.semget(key, 1, 0), 0, 16, 7)


def takes_a_message(key: int) -> object:
    """msgget and msgrcv"""
    import ctypes

    libc = ctypes.CDLL(None)
    content = ctypes.create_string_buffer(256)
    libc.msgrcv(libc.msgget(key, 0), content, 200, 0, 0o4000)
    return content.raw


def takes_a_posix_message(object_name: str) -> object:
    """mq_open and mq_timedreceive"""
    import ctypes

    libc = ctypes.CDLL(None)
    content = ctypes.create_string_buffer(8192)
    fd = libc.syscall(240, object_name.encode(), 0o4000, 0, None)
    libc.syscall(243, fd, content, 8192, None, None)
    return content.value


def reads_posix_shared_memory(object_name: str) -> object:
    """multiprocessing.shared_memory"""
    from multiprocessing import shared_memory

    held = shared_memory.SharedMemory(object_name)
    return bytes(held.buf)
