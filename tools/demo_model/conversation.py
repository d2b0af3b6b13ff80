"""The elements of the training text: conversations for the chat template, and plain text."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Tools, calls and their results are also text, as rendered by the chat template.
    """

    role: Role
    text: str
    num_given: int = 0
    """Number of characters at its beginning that a grammar forces, and that are not learned."""


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PlainText:
    """Text for a plain completion, without roles."""

    text: str


Document = Conversation | PlainText
