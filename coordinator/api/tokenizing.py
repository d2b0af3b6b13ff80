"""Limits tokenizer use by calls that run on no node: the other calls need its threads, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.api.context import ApiContext
from coordinator.text.tokenizer import LONG_TEXT_CHARS
from pdserve.errors import Overloaded


@asynccontextmanager
async def turn(context: ApiContext, num_bytes: int | None) -> AsyncIterator[None]:
    """Hold a turn at the tokenizer while the context is open; long texts take turns one by one.

    `num_bytes`: upper bound of the text's size; None: unknown, treated as long. Raises Overloaded.
    """
    if num_bytes is not None and num_bytes <= LONG_TEXT_CHARS:
        yield
        return
    try:
        async with asyncio.timeout(context.config.tokenize_wait_s):
            await context.tokenizing.acquire()
    except TimeoutError as error:
        raise Overloaded(
            "too many long texts are waiting to be tokenised; try again later"
        ) from error
    try:
        yield
    finally:
        context.tokenizing.release()
