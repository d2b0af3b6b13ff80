"""Where messages to a node or to a coordinator end in a test."""

from __future__ import annotations

import msgspec


class RecordingOutbox:
    """In place of an outbox or a link: keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)
