"""What a conversation is compacted to: the model's own summary of it.

Clients pass it on as it is; base64 says that it is not for them to read, and keeps nothing secret.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from pdserve.errors import InvalidRequest

SUMMARY_HEAD = "This is what was said before, in short:\n"
_TASK = (
    "Sum up our conversation so far for somebody who has to go on with it and has not read it: "
    "what is wanted, what is known and was decided, what has been done, and what is left to do. "
    "Keep names, numbers and quotes exact. Write the summary and nothing else."
)


def with_task(given: Any) -> list[Any]:
    """A request's input, and what the model is to do with it."""
    task = {"role": "user", "content": _TASK}
    if given is None:
        return [task]
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    return [*items, task]


def sealed(summary: str) -> str:
    """As clients get it."""
    return base64.b64encode(summary.encode()).decode()


def summary_of(content: str, param: str) -> str:
    """What was sealed. Raises InvalidRequest."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"{param!r} is none that was made here", param) from error
