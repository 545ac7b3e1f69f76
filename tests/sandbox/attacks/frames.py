"""Attacks on the host: a runner that writes forbidden messages to the descriptor of its channel.

Code in a runner can write anything to that descriptor. Its messages may fail its own request, and must
affect nothing else.
"""

from __future__ import annotations


def lies_about_the_header() -> object:
    """a header of four gigabytes"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    channel.socket.sendall(b"\xff" * 4 + bytes(8))
    return "FORGED"


def lies_about_the_body() -> object:
    """a body of sixteen exabytes"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    channel.socket.sendall((10).to_bytes(4, "big") + b"\xff" * 8)
    return "FORGED"


def lies_a_little() -> object:
    """a whole body just over the limit"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "log"}, bytes(128 << 20))
    return "FORGED"


def sends_no_json() -> object:
    """a header that is not JSON"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    channel.socket.sendall((7).to_bytes(4, "big") + bytes(8) + b"garbage")
    return "FORGED"


def sends_no_text() -> object:
    """a header that is not text"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    channel.socket.sendall((4).to_bytes(4, "big") + bytes(8) + b"\xff\xfe\x00\xff")
    return "FORGED"


def sends_no_object() -> object:
    """a header that is a list"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    channel.socket.sendall((2).to_bytes(4, "big") + bytes(8) + b"[]")
    return "FORGED"


def sends_no_kind() -> object:
    """a header without a kind"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"sort": "log"})
    return "FORGED"


def sends_a_kind_that_is_no_text() -> object:
    """a header whose kind is a list"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": ["log"]})
    return "FORGED"


def sends_depths() -> object:
    """a header of nested lists, too deep for a parser"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    text = b"[" * 500_000
    channel.socket.sendall(len(text).to_bytes(4, "big") + bytes(8) + text)
    return "FORGED"


def sends_depths_in_a_log() -> object:
    """a log whose header holds nested lists"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    text = b'{"kind": "log", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    channel.socket.sendall(len(text).to_bytes(4, "big") + bytes(8) + text)
    return "FORGED"


def sends_a_huge_number() -> object:
    """a header with a number of a million digits"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    text = b'{"kind": "log", "a": ' + b"9" * 1_000_000 + b"}"
    channel.socket.sendall(len(text).to_bytes(4, "big") + bytes(8) + text)
    return "FORGED"


def sends_an_unknown_kind() -> object:
    """an unknown kind"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "fly"})
    return "FORGED"


def sends_kinds_of_the_control_channel() -> object:
    """messages that only the process that holds the model may send"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for kind in ("exited", "forked", "ready", "failed", "owned"):
        send({"kind": kind, "runner": "", "pid": 1, "code": 0, "model": {}})
    return "FORGED"


def sends_a_result_without_its_cost() -> object:
    """a result whose header lacks its report"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "returned"}, b"FORGED")
    return "FORGED"


def sends_a_result_with_a_wrong_cost() -> object:
    """a result whose report is a string"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "returned", "compressed": True, "report": "FORGED"}, b"FORGED")
    return "FORGED"


def sends_a_cost_that_is_no_number() -> object:
    """an error whose report holds NaN, which JSON forbids"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    report = {"peak_memory": float("nan"), "steps": []}
    send({"kind": "error", "report": report}, b"FORGED")
    return "FORGED"


def sends_a_negative_cost() -> object:
    """an error whose report holds a negative number"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "error", "report": {"peak_memory": -1, "steps": []}}, b"FORGED")
    return "FORGED"


def sends_an_astronomic_cost() -> object:
    """an error whose report holds a number near the largest float"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "error", "report": {"peak_memory": 1e308, "steps": []}}, b"FORGED")
    return "FORGED"


def sends_a_cost_that_is_no_text() -> object:
    """an error whose report holds lone surrogates"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "error", "report": {"\ud800": "\udfff"}}, b"FORGED")
    return "FORGED"


def sends_a_cost_of_depths() -> object:
    """an error whose report holds nested dictionaries"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    text = b'{"kind": "error", "report": ' + b'{"a":' * 900 + b"1" + b"}" * 901
    channel.socket.sendall(len(text).to_bytes(4, "big") + bytes(8) + text)
    return "FORGED"


def sends_an_error_of_megabytes() -> object:
    """an error with a text of forty megabytes"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "error", "report": {"peak_memory": 1, "steps": []}}, b"x" * (40 << 20))
    return "FORGED"


def sends_a_result_over_the_limit(result_bytes: int) -> object:
    """a result over the limit, in the frame"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send(
        {"kind": "returned", "compressed": False, "report": {"peak_memory": 1, "steps": []}},
        bytes(result_bytes * 10),
    )
    return "FORGED"


def sends_a_result_just_over_the_limit(result_bytes: int) -> object:
    """a result over the limit, in a frame as large as a client's message may be"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send(
        {"kind": "returned", "compressed": False, "report": {"peak_memory": 1, "steps": []}},
        bytes(result_bytes),
    )
    return "FORGED"


def floods_with_statuses() -> object:
    """the status "running", repeatedly"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for _ in range(200_000):
        send({"kind": "running"})
    return "FORGED"


def floods_with_unknown_kinds(seconds: float) -> object:
    """unknown kinds, repeatedly"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        send({"kind": "fly"}, bytes(1 << 16))
    return "SURVIVED"


def floods_with_logs(log_bytes: int) -> object:
    """log frames that bypass the count of lines"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for _ in range(log_bytes // 100):
        send({"kind": "log"}, b"x" * 1000)
    return "SURVIVED"


def floods_with_streams(streamed_bytes: int) -> object:
    """streams, which a hybrid job sends to its client"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for _ in range(streamed_bytes >> 16):
        send({"kind": "stream"}, bytes(1 << 16))
    return "SURVIVED"


def floods_with_a_large_stream(streamed_bytes: int) -> object:
    """one function for the client, over the limit"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "stream"}, bytes(streamed_bytes))
    return "SURVIVED"


def asks_for_many_files() -> object:
    """requests for result files, one after the other"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for _ in range(300):
        send({"kind": "spill", "size": 1})
        channel.receive()
    return "FORGED"


def says_spilled_without_a_file() -> object:
    """a result in a file that does not exist"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "spilled", "report": {"peak_memory": 1, "steps": []}})
    return "FORGED"


def spills_a_lie() -> object:
    """a result in its file, which is empty"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "spill", "size": 1 << 40})
    channel.receive()
    send({"kind": "spilled", "report": {"peak_memory": 1, "steps": []}})
    return "FORGED"


def fills_the_disk(disk_bytes: int) -> object:
    """a result file larger than the limit"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    import os

    send({"kind": "spill", "size": disk_bytes})
    _, _, [fd] = channel.receive()
    for _ in range(disk_bytes >> 20):
        os.write(fd, bytes(1 << 20))
    os.fsync(fd)
    send({"kind": "spilled", "report": {"peak_memory": 1, "steps": []}})
    return "SURVIVED"


def fills_the_disk_with_a_hole(disk_bytes: int) -> object:
    """a result file with allocated but unwritten blocks"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    import os

    send({"kind": "spill", "size": disk_bytes})
    _, _, [fd] = channel.receive()
    os.posix_fallocate(fd, 0, disk_bytes)
    send({"kind": "spilled", "report": {"peak_memory": 1, "steps": []}})
    return "SURVIVED"


def answers_twice() -> object:
    """a result, and another one for the next request"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    for text in (b"FORGED", b"FORGED AGAIN"):
        send({"kind": "error", "report": {"peak_memory": 1, "steps": []}}, text)
    return "FORGED"


def answers_for_the_next() -> object:
    """an end, and then a log and a result for the next request"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    send({"kind": "error", "report": {"peak_memory": 1, "steps": []}}, b"mine")
    send({"kind": "running"})
    send({"kind": "log"}, b"FORGED")
    send({"kind": "error", "report": {"peak_memory": 1, "steps": []}}, b"FORGED")
    return "FORGED"


def answers_and_goes_on(seconds: float) -> object:
    """an end, while the block continues"""
    import gc
    import json

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]

    def send(header: object, body: bytes = b"") -> None:
        text = json.dumps(header).encode()
        sizes = len(text).to_bytes(4, "big") + len(body).to_bytes(8, "big")
        channel.socket.sendall(sizes + text + body)

    import time

    send({"kind": "error", "report": {"peak_memory": 1, "steps": []}}, b"mine")
    time.sleep(min(seconds, 60))
    return "FORGED"


def closes_and_goes_on(seconds: float) -> object:
    """a closed channel, while the block sleeps"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import time

    channel.socket.close()
    time.sleep(min(seconds, 60))
    return "FORGED"


def closes_and_works_on(seconds: float) -> object:
    """a closed channel, while the block computes"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import time

    channel.socket.close()
    end = time.monotonic() + min(seconds, 60)
    while time.monotonic() < end:
        pass
    return "FORGED"


def sends_half_a_frame(seconds: float) -> object:
    """half a frame, and then nothing"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import time

    channel.socket.sendall((100).to_bytes(4, "big") + bytes(8) + b'{"kind": ')
    time.sleep(seconds)
    return "SURVIVED"


def sends_a_frame_slowly(seconds: float) -> object:
    """a frame that is sent byte by byte, slowly"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import time

    channel.socket.sendall((1000).to_bytes(4, "big") + bytes(8))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        channel.socket.sendall(b" ")
        time.sleep(0.05)
    channel.socket.sendall(b" " * 1000)
    return "SURVIVED"


def sends_half_a_frame_and_ends() -> object:
    """half a frame, and then the process ends"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import os

    channel.socket.sendall((100).to_bytes(4, "big") + bytes(8) + b'{"kind": ')
    os._exit(0)
    return "FORGED"


def sends_descriptors() -> object:
    """hundreds of descriptors, which the host would hold"""
    import gc

    [channel] = [
        candidate
        for candidate in gc.get_objects()
        if type(candidate).__name__ == "FrameChannel" and candidate.socket.fileno() >= 0
    ]
    import json
    import os
    import socket

    header = json.dumps({"kind": "fly"}).encode()
    frame = len(header).to_bytes(4, "big") + bytes(8) + header
    for _ in range(100):
        socket.send_fds(channel.socket, [frame], [os.dup(0)] * 50)
    return "FORGED"
