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

from pdserve.commands.cluster.coordinator_http import (
    Trust,
    events_in,
    key_headers,
    not_reached,
)
from pdserve.measured.trace_lines import TraceHeader, TraceLine
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import OK

_MOST_PROMPTS: Final = 200_000  # the newest, among which a request finds the one that it extends
_SILENCE_S: Final = 60.0  # in which the coordinator would have given several signs of life


def run(url: str, output: Path, for_s: float, trust: Trust = True) -> int:
    """Record until Ctrl-C, or for so many seconds (0: no limit); the exit code.

    Raises:
        ConfigError: the file is there already, or cannot be written, or the time is negative.
        ClusterError: the coordinator does not let this be recorded, or has gone.
    """
    if not for_s >= 0:
        raise ConfigError(f"--for-s {for_s:g}: must be 0 (until Ctrl-C) or more")
    try:
        with output.open("xb") as file:
            num_lines = asyncio.run(_record(url, file, for_s, trust))
    except ClusterError:
        if not output.stat().st_size:  # another try may have the name
            output.unlink()
        raise
    except FileExistsError as error:
        raise ConfigError(f"{output} is there already: name a new file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    print(f"{num_lines} requests written to {output}")
    return OK


async def _record(url: str, file: BinaryIO, for_s: float, trust: Trust) -> int:
    enough, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, enough.set)
    if for_s:
        loop.call_later(for_s, enough.set)
    conversations = Conversations()
    recording = asyncio.create_task(_read(url, file, conversations, trust))
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait({recording, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if recording.done():
        recording.result()
        raise ClusterError(f"{url} has ended the recording; what came until then is kept")
    recording.cancel()
    await asyncio.gather(recording, return_exceptions=True)
    return conversations.num_lines


async def _read(url: str, file: BinaryIO, conversations: Conversations, trust: Trust) -> None:
    """Write what the coordinator tells, line by line, until it ends.

    Raises:
        ClusterError: it refuses, is silent, has gone, or is no coordinator.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=key_headers()) as session,
            session.get(f"{url.rstrip('/')}/admin/record", ssl=trust) as response,
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
    except msgspec.DecodeError as error:
        raise ClusterError(f"{url} does not speak as a coordinator does: {error}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise not_reached(url, error) from error


class Conversations:
    """Finds which request extends which."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._ended: OrderedDict[int, TraceLine] = OrderedDict()  # by a prompt's last full block

    def placed(self, line: TraceLine) -> TraceLine:
        """Return the line with its place in a conversation.

        It follows the request with the longest prompt that it begins with, if that one had ended
        before. Prompts without a full block are too short to tell.
        """
        self.num_lines += 1
        before = self._before(line)
        if before is not None:
            think_s = line.timestamp / 1e3 - _end_s(before)
            line = replace(line, follows=before.id, think_s=round(think_s, 3))
        if line.hash_ids and not line.error:
            last = line.hash_ids[-1]
            # Its blocks are not needed here, and many.
            self._ended[last] = replace(line, hash_ids=[])
            self._ended.move_to_end(last)
            if len(self._ended) > _MOST_PROMPTS:
                self._ended.popitem(last=False)
        return line

    def _before(self, line: TraceLine) -> TraceLine | None:
        for block in reversed(line.hash_ids):
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
