"""Which ways of moving KV between nodes work here: tried out, not guessed."""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import closing

from pdserve.cli.finding import Finding, Verdict

_TOPIC = "KV transports"
_LATER = "not yet part of pdserve"


def transport_findings() -> list[Finding]:
    """The transports that exist, and those that do not yet."""
    return [
        _tried("shm", probe_shm(), Verdict.ABSENT, "KV transfer on one host at memory speed"),
        _tried("tcp", probe_tcp(), Verdict.BROKEN, "KV transfer between any two nodes"),
        _absent("nixl (UCX)", "KV transfer over RDMA, and between GPUs of different hosts"),
        _absent("cuda_ipc", "KV transfer between GPUs of one host"),
        _absent("nccl", "KV transfer between GPUs where NIXL cannot be installed"),
    ]


def probe_shm() -> str:
    """Pass shared memory through a unix socket, as two nodes do; what failed, or nothing."""
    message = b"kv"
    try:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing(here), closing(there):
            fd = os.memfd_create("pdserve-doctor", os.MFD_CLOEXEC)
            try:
                os.ftruncate(fd, mmap.PAGESIZE)
                os.pwrite(fd, message, 0)
                socket.send_fds(here, [b"."], [fd])
            finally:
                os.close(fd)
            _, fds, _, _ = socket.recv_fds(there, 1, 1)
        try:
            with mmap.mmap(fds[0], mmap.PAGESIZE, prot=mmap.PROT_READ) as mapping:
                arrived = mapping[: len(message)]
        finally:
            os.close(fds[0])
    except OSError as error:
        return str(error)
    return "" if arrived == message else "the memory arrived with other content"


def probe_tcp() -> str:
    """Connect to ourselves; what failed, or nothing."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2.0).close()
    except OSError as error:
        return str(error)
    return ""


def _tried(name: str, failure: str, otherwise: Verdict, needed_for: str) -> Finding:
    return Finding(
        topic=_TOPIC,
        name=name,
        verdict=otherwise if failure else Verdict.OK,
        detail=f"does not work here: {failure}" if failure else "works here",
        needed_for=needed_for,
    )


def _absent(name: str, needed_for: str) -> Finding:
    return Finding(
        topic=_TOPIC, name=name, verdict=Verdict.ABSENT, detail=_LATER, needed_for=needed_for
    )
