"""Turns at the tokenizer for calls that have no node work: other calls need its threads, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.api.context import ApiContext
from coordinator.text.tokenizer import LONG_TEXT_CHARS
from pdserve.errors import Overloaded


@asynccontextmanager
async def turn(context: ApiContext, num_bytes: int | None) -> AsyncIterator[None]:
    """What is long is done one after another.

    `num_bytes`: of what is tokenised, at most; None: it is not known. Raises Overloaded.
    """
    if num_bytes is not None and num_bytes <= LONG_TEXT_CHARS:
        yield
        return
    try:
        async with asyncio.timeout(context.config.tokenize_wait_s):
            await context.tokenizing.acquire()
    except TimeoutError as error:
        raise Overloaded("many long texts wait to be tokenised") from error
    try:
        yield
    finally:
        context.tokenizing.release()
