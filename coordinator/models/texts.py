"""Tokenizers and chat templates of many models, in bounded memory.

A tokenizer is loaded when its model is asked for, or gets a node, and equal ones are one. It stays
while its model has a node or a call has it. Of those whose models sleep, the ones that were asked
for last stay, up to `KEPT_BYTES` together.

Loading is in a thread, but the library that parses a tokenizer holds the interpreter lock: half a
second for 128,000 tokens. So it begins with a node's wake, and not only with the call after it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary, finalize

from coordinator.models.text_files import TextFiles, TextKey
from coordinator.text import Tokenizer
from coordinator.text.grammars import GrammarChecker
from coordinator.text.grammars.process import GrammarProcess
from coordinator.text.renderers import Renderers
from pdserve.shared.errors import DeadlineExceeded, Overloaded, PdserveError
from pdserve.shared.process.collector import return_free_memory

log = logging.getLogger(__name__)

KEPT_BYTES: Final = 512 << 20
TOKEN_BYTES: Final = 640  # of memory for each token of a vocabulary, merges included
PROCESS_BYTES: Final = 50 << 20  # of one that renders chats, or checks grammars
LOAD_S: Final = 60.0  # for which a call waits, on a busy machine
_PAUSE_S: Final = 5.0  # after a failure
_BEGUN: Final = 4  # processes for which no further one is started before there are chats


class Text:
    """A tokenizer with the processes that work for it, for as long as anybody has it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer: Final = tokenizer
        self._process = GrammarProcess(tokenizer)
        self.grammars: Final = GrammarChecker(self._process)

    @property
    def processes(self) -> list[GrammarProcess | Renderers]:
        """Those that may have been started for it."""
        renderers = self.tokenizer.renderers
        return [self._process] if renderers is None else [self._process, renderers]

    @property
    def num_running(self) -> int:
        """Number of them that run."""
        return sum(len(process.pids) for process in self.processes)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, roughly."""
        return TOKEN_BYTES * self.tokenizer.num_texts + PROCESS_BYTES * self.num_running

    async def close(self) -> None:
        """End its processes and threads."""
        await self.grammars.close()
        await self.tokenizer.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    error: PdserveError
    at_s: float


class Texts:
    """Those of all models. Used on one event loop."""

    def __init__(self, is_awake: Callable[[TextKey], bool], kept_bytes: int = KEPT_BYTES) -> None:
        """`is_awake`: whether a model of these files has a node."""
        self._is_awake = is_awake
        self._kept_bytes = kept_bytes
        self._there: WeakValueDictionary[TextKey, Text] = WeakValueDictionary()
        self._kept: OrderedDict[TextKey, Text] = OrderedDict()  # least recently asked for first
        self._loading: dict[TextKey, asyncio.Task[Text]] = {}
        self._failed: dict[TextKey, _Failure] = {}
        self._turn = asyncio.Lock()  # one at a time: others would only wait for the interpreter

    def __len__(self) -> int:
        """Return the number of tokenizers in memory."""
        return len(self._there)

    async def get(self, files: TextFiles, until_s: float = math.inf) -> Text:
        """Return the text of these files.

        Args:
            until_s: when its caller gives up, of time.monotonic.

        Raises:
            PdserveError: the files cannot be used.
            DeadlineExceeded: the caller's time is over.
            Overloaded: it takes too long.
        """
        text = self._there.get(files.key)
        if text is None:
            text = await self._wait(self._load_once(files), until_s)
        is_new = files.key not in self._kept
        self._kept[files.key] = text
        self._kept.move_to_end(files.key)
        if is_new:
            self.trim()
        return text

    async def prepare(self, files: TextFiles) -> None:
        """Load it, since its model is about to be asked; the log says if that is not possible."""
        with suppress(PdserveError):
            text = await self.get(files)
            if sum(one.num_running for one in self._there.values()) < _BEGUN:
                await text.tokenizer.begin()

    def trim(self) -> None:
        """Let go of what nobody has asked for lately, if there is too much of it."""
        asleep = [key for key in self._kept if not self._is_awake(key)]
        num_bytes = sum(self._kept[key].num_bytes for key in asleep)
        for key in asleep:
            if num_bytes <= self._kept_bytes:
                return
            num_bytes -= self._kept.pop(key).num_bytes

    async def close(self) -> None:
        """End the processes of all."""
        for task in self._loading.values():
            task.cancel()
        for text in list(self._there.values()):
            await text.close()

    # ---- parts ---------------------------------------------------------------------------------

    async def _wait(self, loading: asyncio.Task[Text], until_s: float) -> Text:
        left_s = until_s - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(left_s, LOAD_S))):
                return await asyncio.shield(loading)
        except TimeoutError:
            if left_s < LOAD_S:
                raise DeadlineExceeded(
                    "the request's time-out passed before the model's tokenizer was loaded"
                ) from None
            raise Overloaded(
                "the model's tokenizer is still being loaded; try again later"
            ) from None

    def _load_once(self, files: TextFiles) -> asyncio.Task[Text]:
        key = files.key
        failure = self._failed.get(key)
        if failure is not None and time.monotonic() < failure.at_s + _PAUSE_S:
            raise type(failure.error)(failure.error.message)
        if key not in self._loading:
            task = self._loading[key] = asyncio.create_task(self._load(files))
            task.add_done_callback(lambda task: self._loaded(key, task))
        return self._loading[key]

    async def _load(self, files: TextFiles) -> Text:
        async with self._turn:
            begun_s = time.monotonic()
            try:
                text = Text(await asyncio.to_thread(_load, files))
            except PdserveError as error:
                log.warning("no tokenizer: %s", error)
                raise
            log.info("tokenizer of %s: %.2f s", files.path, time.monotonic() - begun_s)
            self._there[files.key] = text
            finalize(text, _drop, asyncio.get_running_loop(), text.processes).atexit = False
            return text

    def _loaded(self, key: TextKey, task: asyncio.Task[Text]) -> None:
        del self._loading[key]
        self._failed.pop(key, None)
        if not task.cancelled() and isinstance(error := task.exception(), PdserveError):
            self._failed[key] = _Failure(error, time.monotonic())


def _load(files: TextFiles) -> Tokenizer:
    tokenizer = files.load()
    return_free_memory()
    return tokenizer


def _drop(loop: asyncio.AbstractEventLoop, processes: list[GrammarProcess | Renderers]) -> None:
    """End processes whose text nobody has any more, whichever thread has had it last."""
    for process in processes:
        with suppress(RuntimeError):  # the loop is closed, and processes are ended
            loop.call_soon_threadsafe(process.drop)
