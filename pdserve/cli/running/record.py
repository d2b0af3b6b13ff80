"""`pdserve record`: writes the requests of a live cluster as a trace, without their text."""

from __future__ import annotations

import asyncio
import signal
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO, Final

import aiohttp
import msgspec
from msgspec.structs import replace

from pdserve.cluster.coordinator_http import events_in, key_headers
from pdserve.errors import ClusterError, ConfigError
from pdserve.measured.trace_lines import TraceHeader, TraceLine
from pdserve.process.exit_codes import OK

_MOST_PROMPTS: Final = 200_000  # the newest, among which a request finds the one that it extends
_SILENCE_S: Final = 60.0  # in which the coordinator would have given several signs of life


def run(url: str, output: Path, for_s: float) -> int:
    """Record until Ctrl-C, or for so many seconds (0: no limit); the exit code.

    Raises:
        ConfigError: the file is there already, or cannot be written.
        ClusterError: the coordinator does not let this be recorded, or has gone.
    """
    try:
        with output.open("xb") as file:
            num_lines = asyncio.run(_record(url, file, for_s))
    except FileExistsError as error:
        raise ConfigError(f"{output} is there already: name a new file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    print(f"{num_lines} requests written to {output}")
    return OK


async def _record(url: str, file: BinaryIO, for_s: float) -> int:
    enough, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, enough.set)
    if for_s:
        loop.call_later(for_s, enough.set)
    conversations = Conversations()
    recording = asyncio.create_task(_read(url, file, conversations))
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait({recording, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if recording.done():
        recording.result()
        raise ClusterError(f"{url} has ended the recording; what came until then is kept")
    recording.cancel()
    await asyncio.gather(recording, return_exceptions=True)
    return conversations.num_lines


async def _read(url: str, file: BinaryIO, conversations: Conversations) -> None:
    """Write what the coordinator tells, line by line, until it ends.

    Raises:
        ClusterError: it refuses, is silent, or has gone.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=key_headers()) as session,
            session.get(f"{url.rstrip('/')}/admin/record") as response,
        ):
            if response.status != 200:
                said = (await response.text())[:500]
                raise ClusterError(f"{url} does not let this be recorded: {response.status} {said}")
            is_first = True
            async for events in events_in(response.content.iter_any()):
                for event in events:
                    if is_first:
                        written = msgspec.json.encode(msgspec.json.decode(event, type=TraceHeader))
                        is_first = False
                    else:
                        line = msgspec.json.decode(event, type=TraceLine)
                        written = msgspec.json.encode(conversations.placed(line))
                    file.write(written + b"\n")
                file.flush()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ClusterError(f"no coordinator at {url}: {error!r}") from error


class Conversations:
    """Finds which request extends which, and numbers blocks from 0 on."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._blocks: dict[int, int] = {}
        self._ended: OrderedDict[int, TraceLine] = OrderedDict()  # by a prompt's last full block

    def placed(self, line: TraceLine) -> TraceLine:
        """Return the line with its place in a conversation.

        It follows the request with the longest prompt that it begins with, if that one had ended
        before. Prompts without a full block are too short to tell.
        """
        self.num_lines += 1
        blocks = self._blocks
        hash_ids = [blocks.setdefault(block, len(blocks)) for block in line.hash_ids]
        before = self._before(line, hash_ids)
        if before is not None:
            think_s = line.timestamp / 1e3 - _end_s(before)
            line = replace(line, follows=before.id, think_s=round(think_s, 3))
        line = replace(line, hash_ids=hash_ids)
        if hash_ids and not line.error:
            self._ended[hash_ids[-1]] = line
            self._ended.move_to_end(hash_ids[-1])
            if len(self._ended) > _MOST_PROMPTS:
                self._ended.popitem(last=False)
        return line

    def _before(self, line: TraceLine, hash_ids: list[int]) -> TraceLine | None:
        for block in reversed(hash_ids):
            before = self._ended.get(block)
            if (
                before is not None
                and before.input_length < line.input_length
                and _end_s(before) <= line.timestamp / 1e3
            ):
                return before
        return None


def _end_s(line: TraceLine) -> float:
    return line.timestamp / 1e3 + line.took_s
