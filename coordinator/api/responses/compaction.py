"""Compaction of a conversation to a summary by the model.

Clients send the summary back unchanged. Base64 marks it as opaque to them; it keeps nothing secret.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pdserve.shared.errors import InvalidRequest

SUMMARY_HEAD = "This is what was said before, in short:\n"
_TASK = (
    "Sum up our conversation so far for somebody who has to go on with it and has not read it: "
    "what is wanted, what is known and was decided, what has been done, and what is left to do. "
    "Keep names, numbers and quotes exact. Write the summary and nothing else."
)


def with_task(given: Any) -> list[Any]:
    """Return a request's input items followed by the instruction to summarise them."""
    task = {"role": "user", "content": _TASK}
    if given is None:
        return [task]
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    return [*items, task]


def sealed(summary: str) -> str:
    """Return a summary in the encoded form that clients get."""
    return base64.b64encode(summary.encode()).decode()


def summary_of(content: str, param: str) -> str:
    """Return the summary from its encoded form. Raises InvalidRequest."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(
            f"{param!r} is not from this server's /v1/responses/compact", param
        ) from error
