"""What the training text consists of: conversations for the chat template, and plain text."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Tools, calls and their results are text as well: what the chat template makes of them.
    """

    role: Role
    text: str
    num_given: int = 0
    """So many characters at its beginning are forced by a grammar, and so are not learned."""


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PlainText:
    """Text for a plain completion, without roles."""

    text: str


Document = Conversation | PlainText
