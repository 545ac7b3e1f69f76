"""Attacks that exhaust resources: memory, time, threads, output.

An attack that returns "SURVIVED" reached its amount.
"""

from __future__ import annotations

from typing import Any

# Memory


def fills_memory_with_tensors(memory_bytes: int) -> object:
    """torch.ones"""
    import torch

    held = [torch.ones(1 << 26, dtype=torch.uint8) for _ in range(memory_bytes >> 26)]
    return f"SURVIVED {len(held)}"


def fills_memory_with_one_tensor(memory_bytes: int) -> object:
    """one tensor, too large at once"""
    import torch

    return f"SURVIVED {torch.ones(memory_bytes, dtype=torch.uint8)[-1]}"


def fills_memory_with_bytes(memory_bytes: int) -> object:
    """bytearrays"""
    held = [bytearray(b"x") * (1 << 24) for _ in range(memory_bytes >> 24)]
    return f"SURVIVED {len(held)}"


def fills_memory_with_text(memory_bytes: int) -> object:
    """a text that doubles"""
    text = "billion laughs! "
    while len(text) < memory_bytes:
        text += text
    return f"SURVIVED {len(text)}"


def fills_memory_with_mappings(memory_bytes: int) -> object:
    """shared anonymous mappings"""
    import mmap

    held = [mmap.mmap(-1, 1 << 26) for _ in range(memory_bytes >> 26)]
    for file in held:
        file.write(b"x" * (1 << 26))
    return f"SURVIVED {len(held)}"


def drops_shared_memory(memory_bytes: int) -> object:
    """shared anonymous memory, written and dropped: the process holds it without resident pages"""
    import mmap

    held = []
    for _ in range(memory_bytes >> 24):
        memory = mmap.mmap(-1, 1 << 24)
        memory.write(b"x" * (1 << 24))
        memory.madvise(mmap.MADV_DONTNEED)
        held.append(memory)
    return f"SURVIVED {sum(block[0] for block in held)}"


def fills_memory_with_page_tables(memory_bytes: int) -> object:
    """reads of one page in every two megabytes of a mapping: each takes a page of the page table"""
    import mmap
    import time

    size = (memory_bytes >> 12) << 21
    held = mmap.mmap(-1, size, mmap.MAP_PRIVATE, mmap.PROT_READ)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    for at in range(0, size, 1 << 21):
        held[at]
    time.sleep(0.3)
    return f"SURVIVED {size}"


def fills_memory_that_grows_down(memory_bytes: int) -> object:
    """memory mapped as a stack, which the limit of writable memory does not count"""
    import mmap
    import time

    grows_down = 0x100
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | grows_down
    held = [mmap.mmap(-1, 1 << 24, flags) for _ in range(memory_bytes >> 24)]
    for file in held:
        file.write(b"x" * (1 << 24))
    time.sleep(0.3)
    return f"SURVIVED {len(held)}"


def fills_memory_with_a_file(memory_bytes: int) -> object:
    """a file in memory, which the address space limit does not count"""
    import os

    fd = os.memfd_create("held")
    for _ in range(memory_bytes >> 24):
        os.write(fd, bytes(1 << 24))
    return f"SURVIVED {os.fstat(fd).st_size}"


def fills_memory_with_kernel_objects(memory_bytes: int) -> object:
    """System V shared memory, which outlives its creator"""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(0, 1 << 20, 0o1600)
    if number < 0:
        raise OSError("refused")
    ctypes.memset(libc.shmat(number, None, 0), 1, 1 << 20)
    libc.shmctl(number, 0, None)
    return f"SURVIVED {memory_bytes}"


def fills_memory_with_pipes(descriptors: int) -> object:
    """full pipes without a reader, whose content the kernel holds"""
    import os

    held = []
    for _ in range(descriptors // 2):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        held.append((reading, os.write(writing, bytes(65536))))
    for reading, _ in held:
        os.close(reading)
    return f"SURVIVED {len(held)}"


def takes_every_descriptor(descriptors: int) -> object:
    """descriptors without end"""
    import os

    held = [os.dup(0) for _ in range(descriptors)]
    for descriptor in held:
        os.close(descriptor)
    return f"SURVIVED {len(held)}"


def locks_memory(memory_bytes: int) -> object:
    """mlockall: memory that the kernel cannot reclaim"""
    import ctypes

    answer = ctypes.CDLL(None).mlockall(2)
    return f"SURVIVED {memory_bytes}" if answer == 0 else "refused"


def raises_its_limits() -> object:
    """setrlimit: unlimited"""
    import resource

    most = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, most)
    return f"SURVIVED {resource.getrlimit(resource.RLIMIT_DATA)}"


# Threads


def starts_threads(threads: int) -> object:
    """threads without end"""
    import threading

    end = threading.Event()
    held = [threading.Thread(target=end.wait, daemon=True) for _ in range(threads)]
    try:
        for thread in held:
            thread.start()
    finally:
        end.set()
    return f"SURVIVED {len(held)}"


def starts_threads_of_torch(threads: int) -> object:
    """torch's thread pool with more threads than the limit"""
    import torch

    torch.set_num_threads(threads)
    matrix = torch.ones(2000, 2000)
    (matrix @ matrix).sum()
    with open("/proc/self/status") as file:  # noqa: PTH123
        count = next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
    return f"SURVIVED {count}" if count >= threads else f"{count} threads"


# Time


def never_ends(seconds: float) -> object:
    """a loop"""
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "SURVIVED"


def sleeps(seconds: float) -> object:
    """time.sleep"""
    import time

    time.sleep(seconds)
    return "SURVIVED"


def catches_everything(seconds: float) -> object:
    """a loop that catches SystemExit, KeyboardInterrupt and every other exception"""
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            while time.monotonic() < end:
                time.sleep(0.01)
        except BaseException:
            continue
    return "SURVIVED"


def ignores_signals(seconds: float) -> object:
    """a loop with every signal ignored and blocked"""
    import signal
    import time

    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(seconds)
    return "SURVIVED"


def blocks_in_c(seconds: float) -> object:
    """a C call that holds the interpreter's lock: no other Python thread runs meanwhile"""
    import ctypes

    libc = ctypes.PyDLL(None)
    for _ in range(int(seconds * 10)):
        libc.usleep(100_000)
    return "SURVIVED"


def waits_for_a_lock(seconds: float) -> object:
    """a lock that is never released"""
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)
    return "SURVIVED"


def multiplies_for_ever(seconds: float) -> object:
    """matrix products, which keep the CPU busy outside Python"""
    import time

    import torch

    end = time.monotonic() + seconds
    matrix = torch.rand(1500, 1500)
    while time.monotonic() < end:
        matrix = (matrix @ matrix) / 750
    return "SURVIVED"


def searches_for_ever() -> object:
    """a regular expression that backtracks, in C and without end"""
    import re

    re.match("(a+)+$", "a" * 30 + "b")
    return "SURVIVED"


def ends_its_timer(seconds: float) -> object:
    """a thread that works on after the block has ended with an error"""
    import threading
    import time

    def work() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    thread = threading.Thread(target=work, daemon=False)
    thread.start()
    thread.join()
    return "SURVIVED"


def crashes() -> object:
    """recursion in C, with the interpreter's limit taken away: the stack ends"""
    import sys

    sys.setrecursionlimit(1 << 30)
    deep: list[Any] = []
    for _ in range(1_000_000):
        deep = [deep]
    return repr(deep)


def recurses_within_limits(model: Any) -> object:
    """recursion, through the model"""

    def deeper() -> object:
        return [deeper()]

    return deeper()


# Output


def returns_too_much(result_bytes: int) -> object:
    """a result over the limit"""
    import torch

    return torch.zeros(result_bytes, dtype=torch.uint8)


def returns_too_much_text(result_bytes: int) -> object:
    """a result over the limit, of one small text many times"""
    return ["laugh" * 200 + str(index) for index in range(result_bytes // 1000)]


def returns_depths() -> object:
    """a result of nested lists, too deep for a pickler"""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def returns_endlessly() -> object:
    """a result that grows while it is serialized"""

    class Endless:
        def __reduce__(self) -> object:
            return (list, ([Endless() for _ in range(10)],))

    return Endless()


def prints_too_much(log_bytes: int) -> object:
    """a log over the limit in bytes"""
    for _ in range(log_bytes // 1000):
        print("x" * 1000)
    return "SURVIVED"


def prints_one_line_too_long(log_bytes: int) -> object:
    """a log over the limit in one line"""
    print("x" * log_bytes)
    return "SURVIVED"


def prints_without_a_newline(log_bytes: int) -> object:
    """a log over the limit without a newline, which is buffered until a newline comes"""
    for _ in range(log_bytes // 1000):
        print("x" * 1000, end="")
    return "SURVIVED"


def prints_too_fast(log_lines: int) -> object:
    """a log over the limit in lines"""
    for _ in range(log_lines):
        print("x")
    return "SURVIVED"


def warns_too_much(log_bytes: int) -> object:
    """a log over the limit by warnings"""
    import warnings

    warnings.simplefilter("always")
    for index in range(log_bytes // 1000):
        warnings.warn(f"{index} {'x' * 1000}", stacklevel=1)
    return "SURVIVED"


def raises_a_huge_error(result_bytes: int) -> object:
    """an error with a very long text"""
    raise ValueError("x" * (result_bytes * 2))
    return None


def raises_a_slow_error(seconds: float) -> object:
    """an error whose text takes very long to compute"""
    import time

    class SlowError(Exception):
        def __str__(self) -> str:
            time.sleep(seconds)
            return "SURVIVED"

    raise SlowError
    return None


def raises_a_chain() -> object:
    """an error caused by an error, thirty thousand times"""
    error = ValueError("first")
    for index in range(30_000):
        later = ValueError(str(index))
        later.__cause__ = error
        error = later
    raise error
    return None


# Payloads


def unpacks_to_too_much(request_bytes: int) -> bytes:
    """zstd: 32 MiB of zeros in a few kilobytes"""
    import zstandard

    return zstandard.compress(b"\x80\x04" + b"N0" * (request_bytes // 2) + b"N.")


def unpacks_to_more_than_it_says() -> bytes:
    """zstd data whose header declares a small size and whose content is large"""
    block = [((128 * 1024) << 3 | 1 << 1 | int(last)).to_bytes(3, "little") for last in (0, 1)]
    content = (block[0] + b"\0") * 4000 + block[1] + b"\0"
    return b"\x28\xb5\x2f\xfd\xe0" + (1000).to_bytes(8, "little") + content


def laughs() -> bytes:
    """a pickle that doubles a text, twenty-six times: 1 GiB"""
    start = b"\x80\x04X\x10\x00\x00\x00billion laughs! q\x000"
    step = b"coperator\nadd\n(h\x00h\x00tRq\x000"
    return start + step * 26 + b"h\x00."


def counts_to_the_end() -> bytes:
    """a pickle that sums a range: C code that runs longer than the limit on any machine"""
    return b"\x80\x04cbuiltins\nsum\n(cbuiltins\nrange\n(L1200000000L\ntRtR."


def asks_for_all_memory() -> bytes:
    """a pickle that makes a bytearray of 640 MiB"""
    return b"\x80\x04cbuiltins\nbytearray\n(L671088640L\ntR."


def nests() -> bytes:
    """a pickle of nested tuples, which overflow the stack when they are freed"""
    return b"\x80\x04N" + b"\x85" * 1_000_000 + b"."
