"""Tokenizers of many models, in bounded memory."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.models.text_files import TextFiles, TextKey
from coordinator.models.texts import TOKEN_BYTES, Text, Texts
from coordinator.text import Tokenizer
from pdserve.shared.errors import DeadlineExceeded, TokenizerError
from tests.fakes.generator import tool_tokenizer

NUM = 100


class Loads:
    """What stands for loading: it counts, and makes tokenizers of one token's memory each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.alive: weakref.WeakSet[Tokenizer] = weakref.WeakSet()
        self.error: Exception | None = None
        monkeypatch.setattr(TextFiles, "load", self._load)
        monkeypatch.setattr(Tokenizer, "num_texts", 1)

    async def left(self, number: int) -> None:
        """Wait until only so many are in memory."""
        async with asyncio.timeout(60.0):
            while len(self.alive) > number:  # the loop still has to drop processes
                await asyncio.sleep(0)
        assert len(self.alive) == number

    def _load(self) -> Tokenizer:
        self.threads.add(threading.current_thread())
        assert self.may_go_on.wait(60.0)
        if self.error is not None:
            raise self.error
        self.loaded.append(1)
        made = tool_tokenizer()
        tokenizer = Tokenizer(made._backend, chat_template=made.chat_template)
        self.alive.add(tokenizer)
        return tokenizer


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def files(number: int) -> TextFiles:
    return TextFiles(Path(f"m{number}"), None, "", bytes([number]))


def keeping(number: int, awake: Sequence[int] = ()) -> Texts:
    keys = {files(one).key for one in awake}
    return Texts(keys.__contains__, number * TOKEN_BYTES)


async def test_of_a_hundred_models_those_stay_that_were_asked_for_last(loads: Loads) -> None:
    texts = keeping(4, awake=[0, 1])
    for number in range(NUM):
        await texts.get(files(number))
    assert len(loads.loaded) == NUM
    assert len(texts) == 4 + 2
    await loads.left(4 + 2)
    for number in (0, 1, 96, 97, 98, 99):
        await texts.get(files(number))
    assert len(loads.loaded) == NUM, "these were there"
    await texts.get(files(95))
    await texts.get(files(97))
    assert len(loads.loaded) == NUM + 1, "96 had to go"
    await texts.get(files(96))
    assert len(loads.loaded) == NUM + 2


async def test_who_has_one_keeps_it_and_others_share_it(loads: Loads) -> None:
    texts = keeping(1)
    held = await texts.get(files(0))
    for number in range(1, 10):
        await texts.get(files(number))
    await loads.left(1 + 1)
    assert await texts.get(files(0)) is held
    assert len(loads.loaded) == 10


async def test_a_model_that_falls_asleep_keeps_its_tokenizer_if_there_is_room(
    loads: Loads,
) -> None:
    awake: set[TextKey] = {files(number).key for number in range(3)}
    texts = Texts(awake.__contains__, TOKEN_BYTES)
    for number in range(3):
        await texts.get(files(number))
    awake.clear()
    texts.trim()
    await loads.left(1)


async def test_it_is_loaded_once_for_all_who_wait_beside_the_loop(loads: Loads) -> None:
    texts = keeping(9)
    loads.may_go_on.clear()
    waiting = [asyncio.create_task(texts.get(files(number % 2))) for number in range(6)]
    gone = asyncio.create_task(texts.get(files(0)))
    await asyncio.sleep(0)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    with pytest.raises(DeadlineExceeded, match="before the model's tokenizer was loaded"):
        await texts.get(files(0), until_s=time.monotonic())
    loads.may_go_on.set()
    found = await asyncio.gather(*waiting)
    assert len(set(map(id, found))) == len(loads.loaded) == 2
    assert threading.current_thread() not in loads.threads


async def test_after_a_failure_it_is_tried_again_but_not_at_once(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, loads.error = keeping(9), TokenizerError("damaged")
    for _ in range(3):
        with pytest.raises(TokenizerError, match="damaged"):
            await texts.get(files(0))
    await texts.prepare(files(0))  # says so in the log
    assert not texts._loading
    loads.error = None
    with pytest.raises(TokenizerError):
        await texts.get(files(0))
    texts._failed = {k: replace(one, at_s=-math.inf) for k, one in texts._failed.items()}
    await texts.get(files(0))
    assert not texts._failed


async def test_processes_end_with_the_last_who_has_the_text(loads: Loads) -> None:
    texts = keeping(0)
    text: Text | None = await texts.get(files(0))
    assert text is not None
    dropped = asyncio.Event()
    for process in text.processes:
        process.drop = dropped.set  # type: ignore[method-assign]
    del process
    assert len(texts) == 1
    text = None
    async with asyncio.timeout(60.0):
        await dropped.wait()
