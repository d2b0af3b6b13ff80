"""The process in which grammars are prepared: started when needed, and again after it has ended."""

from __future__ import annotations

import msgspec

from coordinator.text.limited_process import LimitedProcess
from coordinator.text.tokenizer import Tokenizer
from pdserve.grammar.child import Beginning, Ready
from pdserve.grammar.preparing import Prepared
from pdserve.shared.errors import GrammarFailed, Overloaded, TokenizerError
from pdserve.shared.fair_share import Turns

# Usually a millisecond; a quarter of a second for the largest legitimate grammars. Each node of an
# answer takes the same time again.
CHECK_CPU_S = 0.5
_MAX_LINE_BYTES = 1 << 20  # of an answer, which is mostly the grammar
BEGIN_S = 60.0  # a vocabulary of 150 000 tokens takes a second or two
_PREPARE_S = 15.0  # far more than its CPU time, on a busy machine


class GrammarProcess:
    """The process for one tokenizer. It prepares one grammar at a time; tenants take turns."""

    def __init__(self, tokenizer: Tokenizer, cpu_s: float = CHECK_CPU_S) -> None:
        self._tokenizer = tokenizer
        self._cpu_s = cpu_s  # for a grammar
        self._process = LimitedProcess("pdserve.grammar.child", "checks grammars", _MAX_LINE_BYTES)
        self._turns = Turns()
        self._has_begun = False

    @property
    def pid(self) -> int | None:
        """The process's id; None if it is not running."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run: one, or none."""
        return [] if self.pid is None else [self.pid]

    @property
    def has_begun(self) -> bool:
        """Whether it has its vocabulary. Else who comes first waits for that, `BEGIN_S` at most."""
        return self._has_begun and self._process.is_running

    async def prepare(self, document: str, tenant: str) -> Prepared:
        """Prepare a document (see pdserve.grammar.preparing) in a turn of this tenant's.

        Raises:
            GrammarFailed: it took too much time or memory.
            TokenizerError: grammars cannot be enforced with this tokenizer.
            Overloaded: the process cannot be started now.
        """
        async with self._turns.of(tenant):
            await self._start_if_needed()
            line = await self._process.ask(msgspec.json.encode(document), _PREPARE_S)
        if not line:
            raise GrammarFailed("it takes too long to prepare, or too much memory")
        return msgspec.json.decode(line, type=Prepared)

    async def close(self) -> None:
        """End the process if it is running."""
        await self._process.end()

    def drop(self) -> None:
        """As `close`, without waiting: nobody will ask it any more."""
        self._process.drop()

    # ---- parts ---------------------------------------------------------------------------------

    async def _start_if_needed(self) -> None:
        if self._process.is_running:
            return
        self._has_begun = False
        await self._process.start()
        end_id = max(self._tokenizer.special_ids, default=self._tokenizer.num_ids)
        path = self._tokenizer.path
        beginning = Beginning(
            # Its text would stop this process for half a second.
            tokenizer_json=self._tokenizer.to_json() if path is None else "",
            path="" if path is None else str(path),
            num_ids=max(self._tokenizer.num_ids, end_id + 1),
            end_id=end_id,  # nodes know which tokens end an answer; here it makes no difference
            cpu_s=self._cpu_s,
        )
        line = await self._process.ask(msgspec.json.encode(beginning), BEGIN_S)
        if not line:
            raise Overloaded("the process that checks grammars ended before it was ready")
        if fault := msgspec.json.decode(line, type=Ready).fault:
            await self._process.end()
            raise TokenizerError(fault)
        self._has_begun = True
