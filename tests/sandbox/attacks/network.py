"""Attacks through the network and every other kind of socket."""

from __future__ import annotations


def connects(tcp_port: int) -> object:
    """TCP"""
    import socket

    return str(socket.create_connection(("127.0.0.1", tcp_port), 1))


def connects_by_v6(tcp6_port: int) -> object:
    """TCP over IPv6"""
    import socket

    return str(socket.create_connection(("::1", tcp6_port), 1))


def connects_by_number(tcp_port: int) -> object:
    """socket and connect by number"""
    import ctypes
    import struct

    libc = ctypes.CDLL(None)
    fd = libc.syscall(41, 2, 1, 0)
    address = struct.pack("<H", 2) + struct.pack("!H", tcp_port) + bytes([127, 0, 0, 1]) + bytes(8)
    return libc.syscall(42, fd, address, 16)


def connects_with_data(tcp_port: int) -> object:
    """sendto with MSG_FASTOPEN, which connects without connect"""
    import socket

    sender = socket.socket()
    return sender.sendto(b"secret", 0x20000000, ("127.0.0.1", tcp_port))


def connects_by_multipath(tcp_port: int) -> object:
    """MPTCP, which TCP rules may not cover; plain TCP if it is unavailable"""
    import socket

    try:
        sender = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    except OSError:
        sender = socket.socket()
    return sender.connect(("127.0.0.1", tcp_port))


def sends_a_datagram(udp_port: int) -> object:
    """UDP"""
    import socket

    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return sender.sendto(b"secret", ("127.0.0.1", udp_port))


def sends_a_datagram_by_v6(udp6_port: int) -> object:
    """UDP over IPv6"""
    import socket

    sender = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    return sender.sendto(b"secret", ("::1", udp6_port))


def connects_to_a_path(unix_path: str) -> object:
    """a unix socket with a name in the file system"""
    import socket

    return socket.socket(socket.AF_UNIX).connect(unix_path)


def sends_to_a_path(unix_datagrams: str) -> object:
    """a datagram to a unix socket with a name in the file system"""
    import socket

    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"secret", unix_datagrams)


def connects_to_an_abstract_name(abstract_name: str) -> object:
    """a unix socket with an abstract name"""
    import socket

    return socket.socket(socket.AF_UNIX).connect("\0" + abstract_name)


def sends_to_an_abstract_name(abstract_name: str) -> object:
    """a datagram to one"""
    import socket

    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    return sender.sendto(b"secret", f"\0{abstract_name}-dgram")


def sends_from_a_pair(abstract_name: str) -> object:
    """sendto of one end of a socket pair, which needs no socket()"""
    import socket

    sender, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return sender.sendto(b"secret", f"\0{abstract_name}-dgram")


def passes_a_descriptor(unix_datagrams: str) -> object:
    """sendmsg with a descriptor to a socket of another process"""
    import socket

    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(unix_datagrams)
    return socket.send_fds(sender, [b"secret"], [1])


def fetches_with_urllib(tcp_port: int) -> object:
    """urllib"""
    import urllib.request

    return urllib.request.urlopen(f"http://127.0.0.1:{tcp_port}/", timeout=0.3).read()


def fetches_with_httpx(tcp_port: int) -> object:
    """httpx"""
    import httpx

    return httpx.get(f"http://127.0.0.1:{tcp_port}/", timeout=0.3).text


def fetches_with_torch_hub(tcp_port: int) -> object:
    """torch.hub"""
    import torch

    url = f"http://127.0.0.1:{tcp_port}/weights"
    return torch.hub.download_url_to_file(url, "/dev/null", progress=False)


def fetches_with_numpy(tcp_port: int) -> object:
    """numpy's DataSource"""
    import numpy

    return numpy.lib.npyio.DataSource(None).open(f"http://127.0.0.1:{tcp_port}/x.txt").read()


def joins_with_torch_distributed(tcp_port: int) -> object:
    """torch.distributed's store, in C++"""
    import datetime

    import torch

    limit = datetime.timedelta(seconds=0.3)
    return str(torch.distributed.TCPStore("127.0.0.1", tcp_port, 2, False, timeout=limit))


def resolves_a_name(udp_port: int) -> object:
    """a DNS query"""
    import socket

    question = b"\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06secret\x00\x00\x01\x00\x01"
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.connect(("127.0.0.1", udp_port))
    return sender.send(question)


def calls_the_server(server_url: str) -> object:
    """a request to the server itself"""
    import urllib.request

    return urllib.request.urlopen(f"{server_url}/ping", timeout=2).read()


def listens() -> object:
    """a listening socket"""
    import socket

    return f"REACHED {socket.create_server(('127.0.0.1', 0)).getsockname()}"


def opens_netlink() -> object:
    """netlink, which reads and configures the network"""
    import socket

    return f"REACHED {socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).fileno()}"


def opens_a_raw_socket() -> object:
    """a raw socket: a packet of any kind, with any sender"""
    import socket

    return f"REACHED {socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).fileno()}"


def opens_a_packet_socket() -> object:
    """a packet socket, which receives all traffic"""
    import socket

    return f"REACHED {socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768).fileno()}"


def opens_every_family() -> object:
    """sockets of every family of the kernel: virtual machines, Bluetooth, crypto, XDP, …"""
    import ctypes

    libc = ctypes.CDLL(None)
    opened = [
        (family, kind)
        for family in range(46)
        for kind in (1, 2, 3, 5)
        if libc.syscall(41, family, kind, 0) >= 0
    ]
    return f"REACHED {opened}" if opened else "none"
