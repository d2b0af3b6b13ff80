"""Errors about a chat that another protocol's request became: they name that one's parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from pdserve.shared.errors import RequestError

Words: TypeAlias = Sequence[tuple[re.Pattern[str], str]]  # chat's parameter |-> the other's


@contextmanager
def renamed(words: Words) -> Iterator[None]:
    """Translate errors raised within from chat's parameters to those of `words`."""
    try:
        yield
    except RequestError as error:
        param = theirs = error.param or ""
        for pattern, word in words:
            theirs = pattern.sub(word, theirs)
        if theirs == param:
            raise
        message = error.message.replace(repr(param), repr(theirs))
        if not param.isidentifier():  # a plain identifier may be an ordinary word of the message
            message = message.replace(param, theirs)
        raise type(error)(message, theirs) from error
