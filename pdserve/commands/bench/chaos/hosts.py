"""Hosts on one machine: network namespaces on one bridge, which can lose each other.

    coordinator, clients, bridge | prefill-0, decode-0 | prefill-1, decode-1 | ...
    10.83.0.1                      10.83.0.2             10.83.0.3

The first one is this thread's while there are any. None has a name: the others are held by
descriptors of this process, so the kernel removes all of them when it ends, however it does.

What one host sends to another is lost when it goes to a link-layer address that nobody has. So
nothing breaks and nothing is refused, in one direction or in both, and no firewall is needed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from pdserve.shared.errors import ClusterError

_CLONE_NEWNET: Final = 0x40000000
_OWN: Final = "/proc/thread-self/ns/net"
_BRIDGE, _CABLE, _TRUNK = "bridge", "cable", "trunk"  # a host's end, and the bridge's
_COMMAND_S: Final = 10.0
_NOBODY: Final = "02:00:0a:53:ff:ff"
# A megabyte a second: KV of a long prompt takes a while, tokens do not.
_SLOW: Final = "rate 8mbit burst 32kbit latency 200ms"


def address(host: int) -> str:
    """Its IP address; host 0 is this process's."""
    return f"10.83.0.{host + 1}"


class Hosts:
    """Hosts 0 to `number` - 1, made by `own_hosts`."""

    def __init__(self, namespaces: Sequence[int]) -> None:
        """`namespaces` are descriptors, one a host."""
        self._namespaces = namespaces

    def __len__(self) -> int:
        return len(self._namespaces)

    @contextmanager
    def entered(self, host: int) -> Iterator[None]:
        """This thread is there, and so is what it starts."""
        enter(self._namespaces[host])
        try:
            yield
        finally:
            enter(self._namespaces[0])

    def lose(self, sender: int, receiver: int) -> None:
        """Nothing that `sender` sends to `receiver` arrives any more."""
        self._send_to(sender, receiver, _NOBODY)

    def find(self, sender: int, receiver: int) -> None:
        """It arrives again."""
        self._send_to(sender, receiver, _link_address(receiver))

    def slow_down(self, host: int) -> None:
        """Let it send little: `_SLOW`. Raises ClusterError."""
        self._run(host, f"tc qdisc add dev {_CABLE} root tbf {_SLOW}")

    def speed_up(self, host: int) -> None:
        """Let it send as much as it can."""
        self._run(host, f"tc qdisc del dev {_CABLE} root")

    def _send_to(self, sender: int, receiver: int, link_address: str) -> None:
        device = _CABLE if sender else _BRIDGE
        self._run(
            sender,
            f"ip neigh replace {address(receiver)} lladdr {link_address} dev {device} "
            "nud permanent",
        )

    def _run(self, host: int, command: str) -> None:
        with self.entered(host):
            _run(command)


@contextmanager
def own_hosts(number: int) -> Iterator[Hosts]:
    """Make this many hosts, of which this thread is on the first one meanwhile.

    Raises:
        ClusterError: they cannot be made here; says why.
    """
    with ExitStack() as stack:
        former = _opened(stack)
        try:
            _leave()
            stack.callback(enter, former)
            namespaces = [_opened(stack)]
            _make_bridge()
            for host in range(1, number):
                namespaces.append(_made(stack, host, namespaces[0]))
            hosts = Hosts(namespaces)
            for sender in range(number):
                for receiver in range(number):
                    if sender != receiver:
                        hosts.find(sender, receiver)
        except OSError as error:
            raise ClusterError(f"no networks can be made here: {error}") from error
        yield hosts


def obstacle() -> str:
    """Why there cannot be such hosts here; empty: there can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no command {tool} (iproute2)"
    try:
        with own_hosts(2) as hosts:
            hosts.slow_down(1)
    except ClusterError as error:
        return str(error)
    return ""


def enter(namespace: int) -> None:
    """Have this thread go on in the network that a descriptor is of. Raises OSError."""
    _call("setns", namespace, _CLONE_NEWNET)


def _leave() -> None:
    """Have this thread go on in a network of its own, which has nothing yet. Raises OSError."""
    _call("unshare", _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _opened(stack: ExitStack) -> int:
    """A descriptor of this thread's network, which holds it."""
    descriptor = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _make_bridge() -> None:
    _run("ip link set lo up")
    _run(f"ip link add {_BRIDGE} address {_link_address(0)} type bridge")
    _run(f"ip address add {address(0)}/24 dev {_BRIDGE}")
    _run(f"ip link set {_BRIDGE} up")


def _made(stack: ExitStack, host: int, first: int) -> int:
    """A further host, on the bridge of the first one, where this thread is before and after."""
    _leave()
    try:
        namespace = _opened(stack)
        _run("ip link set lo up")
        there = f"/proc/{os.getpid()}/fd/{first}"
        peer = f"peer name {_TRUNK}{host} netns {there}"
        _run(f"ip link add {_CABLE} address {_link_address(host)} type veth {peer}")
        _run(f"ip address add {address(host)}/24 dev {_CABLE}")
        _run(f"ip link set {_CABLE} up")
    finally:
        enter(first)
    _run(f"ip link set {_TRUNK}{host} master {_BRIDGE} up")
    return namespace


def _link_address(host: int) -> str:
    return f"02:00:0a:53:00:{host + 1:02x}"


def _run(command: str) -> None:
    """Run a command of iproute2 to its end. Raises ClusterError."""
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{command}: {error}") from error
    if done.returncode:
        raise ClusterError(f"{command}: {done.stderr.strip()}")
