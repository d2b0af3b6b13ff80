"""Access tokens: they admit the pullers of open sessions to an exporter's transports.

Sessions are for nodes that a coordinator has introduced (`pdserve/introduction.py`), and transports
are for nodes with a session. A token is valid as long as its session.

What a token permits depends on the transport. With a two-sided one (tcp, nccl), the exporter
verifies each ticket and its expiry before it sends a byte. With a one-sided one (shm, cuda_ipc,
ucx), the puller can read the whole pool from then on until it unmaps it, even after its session has
ended; the exporter never sees the tickets, and only the generations tell whether a read is valid.
"""

from __future__ import annotations

import secrets

from pdserve.errors import AccessDenied

ACCESS_BYTES = 32


class AccessTokens:
    """The tokens of one exporter's open sessions."""

    def __init__(self) -> None:
        self._valid: set[bytes] = set()

    def grant(self) -> bytes:
        """Create a token. A secret: never logged or shown."""
        token = secrets.token_bytes(ACCESS_BYTES)
        self._valid.add(token)
        return token

    def add(self, token: bytes) -> None:
        """Let a token be valid that the node has created, on another host."""
        self._valid.add(token)

    def revoke(self, token: bytes) -> None:
        """Invalidate a token. Idempotent."""
        self._valid.discard(token)

    def check(self, token: bytes) -> None:
        """Check that a token belongs to an open session.

        Raises:
            AccessDenied: it does not.
        """
        # The timing of a hash lookup does not reveal how much of a guess is right: hashes of
        # `bytes` are keyed per process.
        if token not in self._valid:
            raise AccessDenied("this connection belongs to no open session with the exporter")
