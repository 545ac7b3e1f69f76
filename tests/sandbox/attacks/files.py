"""Attacks on files: reading, writing and changing files that no block may access."""

# These are attacks; the usual style rules do not apply.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH120, PTH123, PTH207, PTH208, PTH211, SIM115

from __future__ import annotations

from typing import Any

# Reading


def reads_with_open(secret_file: str) -> object:
    """open()"""
    return open(secret_file).read()


def reads_with_os_open(secret_file: str) -> object:
    """os.open and os.read"""
    import os

    return os.read(os.open(secret_file, os.O_RDONLY), 4096)


def reads_with_io(secret_file: str) -> object:
    """io.FileIO"""
    import io

    return io.FileIO(secret_file).read()


def reads_with_open_code(secret_file: str) -> object:
    """io.open_code, which imports use"""
    import io

    return io.open_code(secret_file).read()


def reads_with_codecs(secret_file: str) -> object:
    """codecs.open"""
    import codecs

    return codecs.open(secret_file).read()


def reads_with_pathlib(secret_file: str) -> object:
    """pathlib.Path.read_text"""
    import pathlib

    return pathlib.Path(secret_file).read_text()


def reads_with_linecache(secret_file: str) -> object:
    """linecache.getlines"""
    import linecache

    return linecache.getlines(secret_file)


def reads_with_a_loader(secret_file: str) -> object:
    """importlib's SourceFileLoader.get_data"""
    import importlib.machinery

    return importlib.machinery.SourceFileLoader("notes", secret_file).get_data(secret_file)


def reads_with_mmap(secret_file: str) -> object:
    """mmap of a descriptor"""
    import mmap
    import os

    return mmap.mmap(os.open(secret_file, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:]


def reads_with_system_calls(secret_file: str) -> object:
    """openat and read by number"""
    import ctypes

    libc = ctypes.CDLL(None)
    content = ctypes.create_string_buffer(4096)
    libc.syscall(0, libc.syscall(257, -100, secret_file.encode(), 0), content, 4096)
    return content.value


def reads_with_openat2(secret_file: str) -> object:
    """openat2 by number"""
    import ctypes
    import os

    how = (ctypes.c_uint64 * 3)(0, 0, 0)
    fd = ctypes.CDLL(None).syscall(437, -100, secret_file.encode(), how, 24)
    return os.read(fd, 4096)


def reads_by_handle(secret_file: str) -> object:
    """name_to_handle_at and open_by_handle_at, which use no path"""
    import ctypes
    import os

    libc = ctypes.CDLL(None)
    handle = ctypes.create_string_buffer((128).to_bytes(4, "little") + bytes(132))
    mount = ctypes.c_int()
    libc.name_to_handle_at(-100, secret_file.encode(), handle, ctypes.byref(mount), 0)
    root = os.open(os.path.dirname(secret_file), os.O_PATH)
    try:
        fd = libc.open_by_handle_at(os.open("/", os.O_RDONLY), handle, 0)
    except OSError:
        fd = libc.open_by_handle_at(root, handle, 0)
    return os.read(fd, 4096)


def reads_with_io_uring(secret_file: str) -> object:
    """io_uring, whose work the kernel does: the setup of its ring"""
    import ctypes

    ring = ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))
    return open(secret_file).read() if ring >= 0 else "no ring"


def reads_with_sendfile(secret_file: str) -> object:
    """sendfile into a pipe"""
    import os

    reading, writing = os.pipe()
    os.sendfile(writing, os.open(secret_file, os.O_RDONLY), 0, 4096)
    return os.read(reading, 4096)


def reads_by_a_symlink(secret_file: str, scratch: str) -> object:
    """a symbolic link to it"""
    import os

    os.symlink(secret_file, f"{scratch}/link")
    return open(f"{scratch}/link").read()


def reads_by_a_hard_link(secret_file: str, scratch: str) -> object:
    """a hard link to it"""
    import os

    os.link(secret_file, f"{scratch}/link")
    return open(f"{scratch}/link").read()


def reads_by_own_root(secret_file: str) -> object:
    """/proc/self/root"""
    return open(f"/proc/self/root{secret_file}").read()


def reads_by_anothers_root(secret_file: str) -> object:
    """/proc/PPID/root of the process that holds the model"""
    import os

    return open(f"/proc/{os.getppid()}/root{secret_file}").read()


def reads_in_a_thread(secret_file: str) -> object:
    """open() in a new thread"""
    import threading

    contents: list[str] = []
    thread = threading.Thread(target=lambda: contents.append(open(secret_file).read()))
    thread.start()
    thread.join()
    return contents


def reads_names(secret_folder: str) -> object:
    """os.listdir"""
    import os

    return os.listdir(secret_folder)


def reads_names_with_glob(secret_folder: str) -> object:
    """glob, and pathlib's"""
    import glob
    import pathlib

    return glob.glob(f"{secret_folder}/*") + [str(f) for f in pathlib.Path(secret_folder).iterdir()]


def reads_with_torch_from_file(secret_file: str) -> object:
    """torch.from_file"""
    import torch

    return bytes(torch.from_file(secret_file, size=30, dtype=torch.uint8).tolist())


def reads_with_a_torch_storage(secret_file: str) -> object:
    """torch.UntypedStorage.from_file"""
    import torch

    storage = torch.UntypedStorage.from_file(secret_file, shared=False, nbytes=30)
    return bytes(storage.tolist())


def reads_with_torch_load(secret_tensors: str) -> object:
    """torch.load"""
    import torch

    return torch.load(secret_tensors)["secret"]


def reads_with_torch_load_mmap(secret_tensors: str) -> object:
    """torch.load with mmap"""
    import torch

    return torch.load(secret_tensors, mmap=True)["secret"]


def reads_with_torch_file_reader(secret_tensors: str) -> object:
    """torch's own reader of zip files, in C++"""
    import torch

    return torch._C.PyTorchFileReader(secret_tensors).get_record("data.pkl")


def reads_with_numpy_load(secret_array: str) -> object:
    """numpy.load"""
    import numpy

    return bytes(numpy.load(secret_array).tolist())


def reads_with_numpy_fromfile(secret_file: str) -> object:
    """numpy.fromfile"""
    import numpy

    return bytes(numpy.fromfile(secret_file, dtype="u1").tolist())


def reads_with_numpy_memmap(secret_file: str) -> object:
    """numpy.memmap"""
    import numpy

    return bytes(numpy.memmap(secret_file, dtype="u1", mode="r").tolist())


def reads_with_numpy_loadtxt(secret_file: str) -> object:
    """numpy.loadtxt"""
    import numpy

    return numpy.loadtxt(secret_file, dtype="str").tolist()


def reads_with_numpy_genfromtxt(secret_file: str) -> object:
    """numpy.genfromtxt"""
    import numpy

    return numpy.genfromtxt(secret_file, dtype="str").tolist()


def reads_with_numpy_datasource(secret_file: str) -> object:
    """numpy's DataSource"""
    import numpy

    return numpy.lib.npyio.DataSource(None).open(secret_file).read()


def reads_a_systems_file(secret_file: str) -> object:
    """open() of the password file"""
    return open(secret_file).readline()


def reads_the_token(secret_file: str) -> object:
    """open() in the folder of the server's Hugging Face token"""
    return open(secret_file).read()


def reads_another_model(secret_file: str) -> object:
    """open() in the folder of a model that is not served"""
    return open(secret_file).read()


def reads_a_result(secret_file: str) -> object:
    """open() in the folder of all users' results"""
    return open(secret_file).read()


# The server's environment and memory


def reads_os_environ(variable: str) -> object:
    """os.environ"""
    import os

    return os.environ[variable]


def reads_getenv_of_libc(variable: str) -> object:
    """getenv of the C library, which knows more than os.environ"""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    return libc.getenv(variable.encode())


def reads_own_environment(variable: str) -> object:
    """/proc/self/environ"""
    return open("/proc/self/environ", "rb").read()


def reads_environment_on_the_stack(variable: str) -> object:
    """the initial stack of the process, searched from the program's name on"""
    import ctypes

    name = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "program_invocation_name").value or 0
    content = b""
    for offset in range(0, 1 << 16, 8):
        # Reads beyond the stack would crash the process; the environment comes before the end of the stack.
        content += ctypes.string_at(name + offset, 8)
        if variable.encode() in content and content.endswith(b"\0"):
            break
    return content


def reads_zygotes_environment(zygote_pid: int) -> object:
    """/proc/PID/environ of the process that holds the model"""
    return open(f"/proc/{zygote_pid}/environ", "rb").read()


def reads_servers_environment(server_pid: int) -> object:
    """/proc/PID/environ of the server"""
    return open(f"/proc/{server_pid}/environ", "rb").read()


def reads_servers_memory(server_pid: int, server_address: int) -> object:
    """/proc/PID/mem of the server"""
    import os

    return os.pread(os.open(f"/proc/{server_pid}/mem", os.O_RDONLY), 8192, server_address)


def reads_servers_memory_by_call(server_pid: int, server_address: int) -> object:
    """process_vm_readv of the server"""
    import ctypes

    content = ctypes.create_string_buffer(4096)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(content), 4096)
    remote = (ctypes.c_uint64 * 2)(server_address, 4096)
    ctypes.CDLL(None).process_vm_readv(server_pid, local, 1, remote, 1, 0)
    return content.raw


# Devices


def opens_a_disk(disk: str) -> object:
    """a block device, or the kernel's log"""
    import os

    return f"REACHED {os.open(disk, os.O_RDONLY | os.O_NONBLOCK)}"


def opens_a_terminal() -> object:
    """/dev/ptmx, which creates a terminal"""
    import os

    return f"REACHED {os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)}"


def opens_own_memory() -> object:
    """/proc/self/mem for writing, which bypasses write protection"""
    return f"REACHED {open('/proc/self/mem', 'r+b').fileno()}"


def watches_a_folder(results_folder: str) -> object:
    """inotify on the folder of results: which results arrive, and when"""
    import ctypes

    libc = ctypes.CDLL(None)
    number = libc.inotify_add_watch(libc.inotify_init(), results_folder.encode(), 0xFFF)
    return f"REACHED {number}" if number >= 0 else "refused"


def watches_a_file_system(results_folder: str) -> object:
    """fanotify on the folder of results"""
    import ctypes

    libc = ctypes.CDLL(None)
    fd = libc.fanotify_init(0x200, 0)
    return f"REACHED {fd}" if fd >= 0 else "refused"


# Writing


def writes_with_open(canary_file: str) -> object:
    """open() for writing"""
    return open(canary_file, "w").write("croaks")


def appends_with_open(canary_file: str) -> object:
    """open() for appending"""
    with open(canary_file, "a") as file:
        file.write("croaks")
    return True


def writes_with_pathlib(canary_folder: str) -> object:
    """pathlib.Path.write_text of a new file"""
    import pathlib

    return pathlib.Path(canary_folder, "new").write_text("croaks")


def writes_with_tempfile(canary_folder: str) -> object:
    """tempfile"""
    import tempfile

    return tempfile.mkstemp(dir=canary_folder)


def writes_a_nameless_file(canary_folder: str) -> object:
    """O_TMPFILE, linked to a name afterwards"""
    import ctypes
    import os

    fd = os.open(canary_folder, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"croaks")
    source, target = f"/proc/self/fd/{fd}".encode(), f"{canary_folder}/new".encode()
    return ctypes.CDLL(None).linkat(-100, source, -100, target, 0x400)


def truncates(canary_file: str) -> object:
    """os.truncate"""
    import os

    return os.truncate(canary_file, 0)


def removes(canary_file: str) -> object:
    """os.unlink"""
    import os

    return os.unlink(canary_file)


def removes_a_folder(empty_folder: str) -> object:
    """os.rmdir"""
    import os

    return os.rmdir(empty_folder)


def removes_a_tree(canary_folder: str) -> object:
    """shutil.rmtree"""
    import shutil

    return shutil.rmtree(canary_folder)


def renames(canary_file: str) -> object:
    """os.rename"""
    import os

    return os.rename(canary_file, canary_file + "-gone")


def makes_a_folder(canary_folder: str) -> object:
    """os.mkdir"""
    import os

    return os.mkdir(f"{canary_folder}/new")


def makes_a_symlink(canary_folder: str) -> object:
    """os.symlink"""
    import os

    return os.symlink("/", f"{canary_folder}/new")


def makes_a_hard_link(canary_file: str) -> object:
    """os.link"""
    import os

    return os.link(canary_file, canary_file + "-too")


def makes_a_pipe(canary_folder: str) -> object:
    """os.mkfifo"""
    import os

    return os.mkfifo(f"{canary_folder}/new")


def makes_a_device(canary_folder: str) -> object:
    """os.mknod of a socket node, in the way a device is created"""
    import os
    import stat

    return os.mknod(f"{canary_folder}/new", 0o600 | stat.S_IFSOCK)


def makes_a_socket(canary_folder: str) -> object:
    """a unix socket bound to a name"""
    import socket

    return socket.socket(socket.AF_UNIX).bind(f"{canary_folder}/new")


def changes_the_mode(canary_file: str) -> object:
    """os.chmod"""
    import os

    return os.chmod(canary_file, 0o4777)


def changes_the_mode_by_number(canary_file: str) -> object:
    """fchmodat2, which is newer than most filters"""
    import ctypes

    return ctypes.CDLL(None).syscall(452, -100, canary_file.encode(), 0o4777, 0)


def changes_the_owner(canary_file: str) -> object:
    """os.chown"""
    import os

    return os.chown(canary_file, os.getuid() or 12345, -1)


def changes_the_times(canary_file: str) -> object:
    """os.utime"""
    import os

    return os.utime(canary_file, (1, 1))


def changes_an_attribute(canary_file: str) -> object:
    """os.setxattr"""
    import os

    return os.setxattr(canary_file, "user.note", b"croaks")


def changes_through_a_path_descriptor(canary_file: str) -> object:
    """O_PATH, which needs no permission, and chmod of /proc/self/fd"""
    import os

    fd = os.open(canary_file, os.O_PATH)
    return os.chmod(f"/proc/self/fd/{fd}", 0o4777)


def writes_with_torch_save(canary_folder: str) -> object:
    """torch.save"""
    import torch

    return torch.save(torch.zeros(2), f"{canary_folder}/new")


def writes_with_torch_from_file(canary_file: str) -> object:
    """torch.from_file of a shared mapping"""
    import torch

    return torch.from_file(canary_file, shared=True, size=5, dtype=torch.uint8).fill_(65).sum()


def writes_with_torch_storage(canary_folder: str) -> object:
    """torch's own writer of zip files, in C++"""
    import torch

    writer = torch._C.PyTorchFileWriter(f"{canary_folder}/new")
    writer.write_end_of_file()
    return True


def writes_with_the_profiler(canary_folder: str) -> object:
    """the profiler's trace"""
    import torch

    with torch.profiler.profile() as profile:
        torch.zeros(2)
    return profile.export_chrome_trace(f"{canary_folder}/new")


def writes_with_numpy_save(canary_folder: str) -> object:
    """numpy.save"""
    import numpy

    return numpy.save(f"{canary_folder}/new", numpy.zeros(2))


def writes_with_numpy_savetxt(canary_folder: str) -> object:
    """numpy.savetxt"""
    import numpy

    return numpy.savetxt(f"{canary_folder}/new", numpy.zeros(2))


def writes_with_tofile(canary_folder: str) -> object:
    """ndarray.tofile"""
    import torch

    return torch.zeros(2).numpy().tofile(f"{canary_folder}/new")


def writes_with_dump(canary_folder: str) -> object:
    """ndarray.dump"""
    import numpy

    return numpy.zeros(2).dump(f"{canary_folder}/new")


def writes_with_numpy_memmap(canary_file: str) -> object:
    """numpy.memmap for writing"""
    import numpy

    mapped = numpy.memmap(canary_file, dtype="u1", mode="r+")
    mapped[:] = 65
    return mapped.flush()


def writes_with_the_model(model: Any, canary_folder: str) -> object:
    """save_pretrained of the model"""
    return model._module.save_pretrained(canary_folder)


def writes_with_the_tokenizer(model: Any, canary_folder: str) -> object:
    """save_pretrained of the tokenizer"""
    return model.tokenizer.save_pretrained(canary_folder)


def writes_with_the_configuration(model: Any, canary_folder: str) -> object:
    """to_json_file of the configuration"""
    return model.config.to_json_file(f"{canary_folder}/new")


def writes_with_a_read_only_descriptor(canary_file: str) -> object:
    """/proc/self/fd, which reopens a file for writing"""
    import os

    fd = os.open(canary_file, os.O_RDONLY)
    return os.write(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), b"croaks")


def writes_beside_the_model(canary_file: str) -> object:
    """open() for writing in the folder of the model, which is readable"""
    return open(canary_file, "w").write("croaks")


def touches_beside_the_model(canary_file: str) -> object:
    """os.utime in the folder of the model, which is readable"""
    import os

    return os.utime(canary_file, (1, 1))


def writes_to_shared_memory(canary_folder: str) -> object:
    """a file in /dev/shm"""
    return open(f"{canary_folder}/new", "w").write("croaks")


def writes_to_the_servers_log(token: str) -> object:
    """inherited standard output and error"""
    import os

    for fd in (0, 1, 2):
        try:
            os.write(fd, f"{token}\n".encode())
        except OSError:
            continue
    return True
