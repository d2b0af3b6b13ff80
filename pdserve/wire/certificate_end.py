"""When a process's certificate ends, so that somebody is told while it can still be renewed."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final

from pdserve.shared.process.certificates import CA_FILE, CERT_FILE, KEY_FILE

log = logging.getLogger(__name__)

_NO_CHECK_TIME: Final = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME


class CertificateEnd:
    """The end of the certificate in a directory, read anew when the file changes."""

    def __init__(self, tls_dir: Path | None) -> None:
        self._directory = tls_dir
        self._seen: tuple[int, int] | None = None  # of the file
        self._ends_at = 0.0

    def seconds(self) -> float:
        """Return it in seconds since 1970; 0: there is none, or it cannot be told (see the log)."""
        if self._directory is not None and (stamp := _stamp(self._directory)) != self._seen:
            self._seen = stamp
            self._ends_at = _end_or_none(self._directory)
        return self._ends_at


def _stamp(directory: Path) -> tuple[int, int]:
    try:
        stat = (directory / CERT_FILE).stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_ino


def _end_or_none(directory: Path) -> float:
    try:
        return _end(directory)
    except OSError as error:  # of ssl, too
        log.warning("when the certificate in %s ends cannot be told: %s", directory, error)
        return 0.0


def _end(directory: Path) -> float:
    """Return when the certificate ends.

    Python's ssl tells this only of a peer's certificate that it has verified. So the process shows
    it to itself, in a handshake in memory, and does not mind if it has ended already.

    Raises:
        OSError: a file cannot be read, or the CA has not signed the certificate.
    """
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(directory / CERT_FILE, directory / KEY_FILE)
    looks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    looks.check_hostname = False
    looks.load_verify_locations(directory / CA_FILE)
    looks.verify_flags |= _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = shows.wrap_bio(there, back, server_side=True)
    client = looks.wrap_bio(back, there)
    while not _shakes_hands(client):
        _shakes_hands(server)
    shown = client.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _shakes_hands(end: ssl.SSLObject) -> bool:
    """Go on as far as possible; whether the handshake is complete."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
