"""Who may talk to whom between processes: certificates (mTLS), a join token, or neither.

A certificate says what its owner is by a DNS name among its SANs, `coordinator.pdserve` or
`node.pdserve`, and not where it is: nodes come and go at any address. So a client verifies that its
server's certificate has the name of the role that it dialled, and a server that its client's has
one of a node. A node's certificate cannot act as a coordinator.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

from pdserve.settings.access import SecurityConfig
from pdserve.shared.addresses import is_loopback
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.certificates import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    Reloaded,
    mutual_context,
    role_name,
    tell_if_outdated,
)

log = logging.getLogger(__name__)

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Refused: TypeAlias = Callable[[str, str], None]  # is told the caller's address, and the reason

_HEALTH: Final = "/grpc.health."  # the prefix of its methods
TOKEN_HEADER: Final = "pdserve-join-token"
_LEAST_TOKEN = 16  # characters


@dataclass(frozen=True, slots=True)
class Security:
    """What a process shows to others, and asks of them. The default: nothing at all."""

    tls_dir: Path | None = None
    token: str = ""

    @staticmethod
    def of(config: SecurityConfig) -> Security:
        """Read what the settings name.

        Raises:
            ConfigError: a file cannot be read or used; says which, and why.
        """
        tls_dir = Path(config.tls_dir) if config.tls_dir else None
        token = (
            read_token(Path(config.join_token_file), "join token") if config.join_token_file else ""
        )
        if tls_dir is not None:
            _check_keys(tls_dir)
        return Security(tls_dir, token)

    @property
    def metadata(self) -> Metadata:
        """What a call carries to be accepted."""
        return ((TOKEN_HEADER, self.token),) if self.token else ()

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials that ask for a certificate, and are read anew when the files change."""
        if self.tls_dir is None:
            return None
        configurations = _Configurations(self.tls_dir)
        return grpc.dynamic_ssl_server_credentials(
            configurations.current, configurations.changed, True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for one channel, from the files as they are now.

        Raises:
            ConfigError: a file cannot be read.
        """
        if self.tls_dir is None:
            return None
        ca, certificate, key = _read_keys(self.tls_dir)
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def gate(self, on_refused: Refused) -> list[grpc.aio.ServerInterceptor]:
        """What refuses calls of those who may not make them."""
        return [_Gate(self, on_refused)] if self.token or self.tls_dir is not None else []


OPEN: Final = Security()


def tell_nobody(peer: str, reason: str) -> None:
    """The default of who is told of refusals: they are in the log anyway."""


def check_exposure(config: SecurityConfig, host: str) -> None:
    """Check that only those can attach who may, if others can reach `host`.

    Raises:
        ConfigError: there are neither certificates nor a join token; says what would be right.
    """
    if not (is_loopback(host) or config.tls_dir or config.join_token_file or config.insecure):
        raise ConfigError(
            f"anybody who reaches {host} could join the cluster and read its prompts: name "
            "certificates (--set security.tls_dir=DIR, made by pdserve certs) or a shared secret "
            "(--set security.join_token_file=FILE), or say --set security.insecure=true if only "
            "trusted machines can reach it"
        )


class _Configurations:
    """The configurations of a server, asked for at every handshake."""

    def __init__(self, directory: Path) -> None:
        self._files = Reloaded(directory, (CA_FILE, CERT_FILE, KEY_FILE), _configuration)
        self.current = self._files.latest()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new one, or None to go on with the one in use."""
        latest = self._files.latest()
        if latest is self.current:
            return None
        self.current = latest
        return latest


class _Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without the join token, or with a certificate that is not a node's."""

    def __init__(self, security: Security, on_refused: Refused) -> None:
        self._security = security
        self._on_refused = on_refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Guard what nodes call; health checks tell nothing and stay open."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_HEALTH):
            return handler
        is_stream = handler.stream_stream is not None
        method = handler.stream_stream if is_stream else handler.unary_unary

        async def guarded(request: object, context: Any) -> Any:
            if refusal := self._refusal(context):
                log.warning("refused %s: %s", context.peer(), refusal)
                self._on_refused(_address(context.peer()), refusal)
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
            return await method(request, context)

        make = (
            grpc.stream_stream_rpc_method_handler
            if is_stream
            else grpc.unary_unary_rpc_method_handler
        )
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _refusal(self, context: Any) -> str:
        """Why a call may not be made; empty if it may."""
        if self._security.tls_dir is not None:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            if role_name("node").encode() not in names:
                return (
                    f"the certificate is for {_text(names)}, not for {role_name('node')}: use one "
                    "made by pdserve certs --role node"
                )
        if not self._security.token:
            return ""
        shown = dict(context.invocation_metadata()).get(TOKEN_HEADER)
        if shown is None:
            return "no join token was shown: set security.join_token_file to the cluster's"
        if not hmac.compare_digest(str(shown).encode(), self._security.token.encode()):
            return "the join token is not the cluster's: compare security.join_token_file"
        return ""


def _address(peer: str) -> str:
    """The address in "ipv4:10.0.0.3:40112": the same whenever a process tries again."""
    return unquote(peer.partition(":")[2].rpartition(":")[0])  # gRPC quotes [ and ] of IPv6


def _text(names: Iterable[bytes]) -> str:
    return ", ".join(name.decode(errors="replace") for name in names) or "nobody"


def read_token(path: Path, name: str) -> str:
    """Return the secret in a file; `name` is what it is called.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the {name} cannot be read: {error}") from error
    if len(token) < _LEAST_TOKEN or not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the {name} in {path} must be at least {_LEAST_TOKEN} printable ASCII characters "
            "in one line, such as those of: openssl rand -hex 32"
        )
    return token


def _read_keys(directory: Path) -> tuple[bytes, bytes, bytes]:
    try:
        ca, certificate, key = (
            (directory / name).read_bytes() for name in (CA_FILE, CERT_FILE, KEY_FILE)
        )
    except OSError as error:
        raise ConfigError(f"a certificate or key cannot be read: {error}") from error
    return ca, certificate, key


def _configuration(directory: Path) -> grpc.ServerCertificateConfiguration:
    _check_keys(directory)  # they may have been written half
    ca, certificate, key = _read_keys(directory)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


def _check_keys(directory: Path) -> None:
    """Check that the files are certificates, and that the key is the certificate's.

    Raises:
        ConfigError: they are not.
    """
    _read_keys(directory)
    mutual_context(ssl.PROTOCOL_TLS_CLIENT, directory)
    tell_if_outdated(directory)
