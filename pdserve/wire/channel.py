"""gRPC channels and servers, with the same limits everywhere."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdserve.shared.addresses import format_address
from pdserve.shared.process.certificates import Role, role_name
from pdserve.shared.process.may_pass import NotNow
from pdserve.wire.security import OPEN, Refused, Security, tell_nobody

MAX_MESSAGE_BYTES = 64 << 20  # a prompt of a million tokens is a few MB

_COMMON = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The receiver's buffer stays at 64 KiB. Else it grows to megabytes, and whatever comes while a
    # process is behind waits behind all of them; in our outboxes callers have turns.
    ("grpc.http2.bdp_probe", 0),
]


def _keepalive(liveness_s: float) -> list[tuple[str, int]]:
    """Options that detect a connection that is dead within about five times `liveness_s`.

    gRPC's own timers cannot tell a peer that was stopped, or that we were, from a peer that is
    gone. So they are far more patient than the coordinator is with silent nodes.
    """
    half_ms = max(1, int(liveness_s * 500))
    patience_ms = 8 * half_ms
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.http2.ping_timeout_ms", patience_ms),  # used by newer gRPC; its default is 60 s
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", half_ms),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", half_ms // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_channel(
    address: str, liveness_s: float, security: Security = OPEN, peer: Role = "node"
) -> grpc.aio.Channel:
    """A channel to `host:port`, a process of role `peer`, with short backoffs.

    The caller reconnects; with certificates, it then shows those that are in the files by then.

    Raises:
        ConfigError: a certificate or key cannot be read.
    """
    options: list[tuple[str, int | str]] = [
        *_COMMON,
        *_keepalive(liveness_s),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
    ]
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", role_name(peer)))
    return grpc.aio.secure_channel(address, credentials, options=options)


class Server:
    """A gRPC server with the standard health service, which first reports NOT_SERVING."""

    def __init__(
        self, liveness_s: float, security: Security = OPEN, on_refused: Refused = tell_nobody
    ) -> None:
        self._security = security
        self.grpc = grpc.aio.server(
            interceptors=security.gate(on_refused),
            options=[*_COMMON, *_keepalive(liveness_s), ("grpc.so_reuseport", 0)],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    async def start(self, host: str, port: int) -> int:
        """Listen on a port, or on any free one for port 0; returns the port.

        Raises:
            NotNow: the address cannot be bound.
        """
        await self.set_serving(False)
        address = format_address(host, port)
        credentials = self._security.server_credentials()
        try:
            if credentials is None:
                bound = self.grpc.add_insecure_port(address)
            else:
                bound = self.grpc.add_secure_port(address, credentials)
        except RuntimeError as error:  # gRPC does not say which of the two
            raise NotNow(
                f"cannot listen on {address}: the port is in use, or the address is not one of "
                "this machine"
            ) from error
        await self.grpc.start()
        return int(bound)

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of the health service."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait for running ones up to `grace_s`, then cancel them."""
        await self.grpc.stop(grace_s)
