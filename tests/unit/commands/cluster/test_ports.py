import asyncio
import socket

import grpc
import pytest

from pdserve.commands.cluster.ports import ReservedPort, reachable
from pdserve.shared.errors import ConfigError


async def test_a_server_can_listen_on_a_reserved_port_and_outlives_the_reservation():
    reserved = ReservedPort("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", reserved.port)
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", reserved.port)
    reserved.close()
    _, writer = await asyncio.open_connection("127.0.0.1", reserved.port)
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_a_grpc_server_can_listen_on_a_reserved_port():
    reserved = ReservedPort("127.0.0.1")
    server = grpc.aio.server()
    assert server.add_insecure_port(f"127.0.0.1:{reserved.port}") == reserved.port
    await server.start()
    await server.stop(None)
    reserved.close()


def test_the_kernel_gives_a_reserved_port_to_nobody_else():
    reserved = [ReservedPort("127.0.0.1") for _ in range(20)]
    assert len({r.port for r in reserved}) == len(reserved)
    for r in reserved:
        r.close()


def test_a_port_that_is_listened_on_is_refused_with_its_number():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{port}: Address already in use: name another"
        ):
            ReservedPort("127.0.0.1", port)


def test_an_address_of_somebody_else_is_refused():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: it is no address of this machine"):
        ReservedPort("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "127.0.0.1:80"),
        ("::", "[::1]:80"),
        ("10.0.0.7", "10.0.0.7:80"),
        ("localhost", "localhost:80"),
    ],
)
def test_where_a_listening_server_is_reached(host, address):
    assert reachable(host, 80) == address
