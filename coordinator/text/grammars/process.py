"""The process in which grammars are prepared: started when needed, and again after it has ended."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from coordinator.text.tokenizer import Tokenizer
from coordinator.text.turns import Turns
from pdserve.config import without_key
from pdserve.errors import GrammarFailed, Overloaded, TokenizerError
from pdserve.grammar.child import Beginning, Ready
from pdserve.grammar.preparing import Prepared

_MAX_LINE_BYTES = 1 << 20  # of an answer, which is mostly the grammar
_BEGIN_S = 60.0  # a vocabulary of 150 000 tokens takes a second or two
_PREPARE_S = 15.0  # far more than its CPU time, on a busy machine


class GrammarProcess:
    """The process for one tokenizer. It prepares one grammar at a time; tenants take turns."""

    def __init__(self, tokenizer: Tokenizer, cpu_s: float) -> None:
        self._tokenizer = tokenizer
        self._cpu_s = cpu_s  # for a grammar
        self._process: Process | None = None
        self._turns = Turns()

    async def begin(self) -> None:
        """Start the process if it is not running.

        Raises:
            TokenizerError: grammars cannot be enforced with this tokenizer.
            Overloaded: the process cannot be started now.
        """
        async with self._turns.of(""):
            await self._running()

    async def prepare(self, document: str, tenant: str) -> Prepared:
        """Prepare a document (see pdserve.grammar.preparing) in a turn of this tenant's.

        Raises:
            GrammarFailed: it took too much time or memory.
            TokenizerError, Overloaded: see `begin`.
        """
        async with self._turns.of(tenant):
            process = await self._running()
            line = await self._answer(process, msgspec.json.encode(document), _PREPARE_S)
        if not line:
            raise GrammarFailed("it takes too long to prepare, or too much memory")
        return msgspec.json.decode(line, type=Prepared)

    async def close(self) -> None:
        """End the process if it is running."""
        if self._process is not None:
            await self._end(self._process)

    # ---- parts ---------------------------------------------------------------------------------

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is not None:
            await self._end(self._process)  # it was killed
        if self._process is None:
            argv = (sys.executable, "-m", "pdserve.grammar.child")
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_MAX_LINE_BYTES,
                    env=without_key(os.environ),
                )
            except OSError as error:
                raise Overloaded(
                    f"the process that checks grammars cannot be started: {error}"
                ) from error
            await self._introduce(self._process)
        return self._process

    async def _introduce(self, process: Process) -> None:
        end_id = max(self._tokenizer.special_ids, default=self._tokenizer.num_ids)
        beginning = Beginning(
            tokenizer_json=self._tokenizer.to_json(),
            num_ids=max(self._tokenizer.num_ids, end_id + 1),
            end_id=end_id,  # nodes know which tokens end an answer; here it makes no difference
            cpu_s=self._cpu_s,
        )
        line = await self._answer(process, msgspec.json.encode(beginning), _BEGIN_S)
        if not line:
            raise Overloaded("the process that checks grammars ended before it was ready")
        if fault := msgspec.json.decode(line, type=Ready).fault:
            await self._end(process)
            raise TokenizerError(fault)

    async def _answer(self, process: Process, line: bytes, timeout_s: float) -> bytes:
        """Send a line and return the answer; empty if the process has ended. Raises Overloaded."""
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(line + b"\n")
                answer = await process.stdout.readline()
        except TimeoutError as error:
            raise Overloaded("this machine is too busy to prepare grammars") from error
        finally:
            if not answer:  # a late answer must not be taken for the next one
                await self._end(process)
        return answer

    async def _end(self, process: Process) -> None:
        self._process = None
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
