"""TLS at a node's metrics port, in clusters with certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from pdserve.process.certificates import (
    CA_FILE,
    CERT_FILE,
    KEY_FILE,
    Reloaded,
    mutual_context,
)


def metrics_tls(directory: Path) -> ssl.SSLContext:
    """Return TLS that asks for a certificate, and goes on without one: probes have none.

    Connections that come after the files changed use the new ones.

    Raises:
        ConfigError: they cannot be used.
    """
    files = Reloaded(directory, (CA_FILE, CERT_FILE, KEY_FILE), _context)
    context = files.latest()

    def use_latest(connection: ssl.SSLObject, *_: object) -> None:
        connection.context = files.latest()

    context.sni_callback = use_latest  # called in each handshake, also if no name is asked for
    return context


def _context(directory: Path) -> ssl.SSLContext:
    context = mutual_context(ssl.PROTOCOL_TLS_SERVER, directory)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
