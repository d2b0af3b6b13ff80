"""Who may use an exporter's transports: whoever was given a token over an open session.

Sessions are for nodes that a coordinator has introduced (`pdserve/introduction.py`); transports are
for those who have a session. A token ends with its session.

What a token opens differs. A two-sided exporter (tcp, nccl) verifies each ticket, and its expiry,
before it sends a byte. A one-sided puller (shm, cuda_ipc, ucx), once it is let in, can read the
whole pool until it unmaps it, also after its session has ended; the exporter does not see its
tickets, and the generations alone decide whether what was read is what a ticket means.
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
        """A new token, unguessable. A secret: never logged or shown."""
        token = secrets.token_bytes(ACCESS_BYTES)
        self._valid.add(token)
        return token

    def revoke(self, token: bytes) -> None:
        """Its session has ended. Idempotent."""
        self._valid.discard(token)

    def check(self, token: bytes) -> None:
        """That a connection belongs to an open session.

        Raises:
            AccessDenied: it does not.
        """
        # A lookup by hash says nothing about how much of a guess was right: hashes of `bytes` are
        # keyed per process.
        if token not in self._valid:
            raise AccessDenied("this connection belongs to no open session with the exporter")
