"""Files of certificates: their names, and what is made of them, anew when they change."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

from pdserve.shared.errors import ConfigError

log = logging.getLogger(__name__)

CA_FILE, CERT_FILE, KEY_FILE = "ca.crt", "tls.crt", "tls.key"  # as cert-manager names them
Role: TypeAlias = Literal["coordinator", "node", "monitor"]  # who only reads nodes' metrics
_Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]
T = TypeVar("T")


def tell_if_outdated(directory: Path) -> None:
    """Log it if the certificate in a directory, whose key fits, has expired or is not yet valid."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE, password="")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(directory / CERT_FILE)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it vouches for itself
    # The standard library reads certificates in handshakes only, so there is one without a network.
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for end in (*ends, ends[0]):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        log.error("others will refuse %s in %s: %s", CERT_FILE, directory, error)


def mutual_context(protocol: int, directory: Path) -> ssl.SSLContext:
    """Return TLS 1.3 that shows the certificate in a directory, and trusts the CA there.

    Raises:
        ConfigError: there is no certificate, key and CA, or they do not fit together.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:  # without a password it would ask for the one of an encrypted key at the terminal
        context.load_verify_locations(directory / CA_FILE)
        context.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{CA_FILE}, {CERT_FILE} and {KEY_FILE} in {directory} do not fit together: {error}"
        ) from error
    return context


def role_name(role: Role) -> str:
    """The DNS name that a certificate of this role has."""
    return f"{role}.pdserve"


class Reloaded(Generic[T]):
    """What was made of files of one directory, for whoever looks at them now and then."""

    def __init__(self, directory: Path, names: Sequence[str], make: Callable[[Path], T]) -> None:
        """Make it of the files as they are.

        Raises:
            ConfigError: `make` does.
        """
        self._directory = directory
        self._names = names
        self._make = make
        self._seen = self._stamp()  # before reading: a change meanwhile is seen at the next look
        self._made = make(directory)

    def latest(self) -> T:
        """What the files make now. If they make nothing, it is logged, and the former stays."""
        stamp = self._stamp()
        if stamp == self._seen:
            return self._made
        self._seen = stamp
        try:
            self._made = self._make(self._directory)
        except ConfigError as error:
            log.error("the new certificates cannot be used, the old ones stay in use: %s", error)
        else:
            log.info("certificates in %s reloaded", self._directory)
        return self._made

    def _stamp(self) -> _Stamp:
        return tuple(_stamp_of(self._directory / name) for name in self._names)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:  # `make` says so, if it still is so then
        return None
    return stat.st_ctime_ns, stat.st_ino, stat.st_size
