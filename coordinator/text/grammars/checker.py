"""Checks, before grammars go to nodes, that they can be enforced in bounded time and memory.

Grammars come from clients and are not trusted. Each is prepared once, in a process that the kernel
ends if it takes too long (pdserve/grammar/child.py), and the result is cached.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType

from coordinator.text.grammars.process import BEGIN_S, GrammarProcess
from pdserve.grammar import Prepared, too_long
from pdserve.shared.errors import GrammarFailed, InvalidRequest, Overloaded, TokenizerError

_WAIT_S = 15.0  # including the queue, in which most grammars take almost no time
MAX_WAITING = 16  # for each tenant
_MAX_REMEMBERED = 256


class GrammarChecker:
    """Checks grammars for one tokenizer. Used on one event loop."""

    def __init__(self, process: GrammarProcess, max_waiting: int = MAX_WAITING) -> None:
        """`max_waiting`: of each tenant."""
        self._process = process
        self._max_waiting = max_waiting
        self._verdicts: OrderedDict[str, Prepared] = OrderedDict()  # by document
        self._under_way: dict[tuple[str, str], asyncio.Task[Prepared]] = {}  # tenant, document
        self._num_waiting: Counter[str] = Counter()  # documents under way, by tenant

    async def close(self) -> None:
        """Cancel checks in progress, and end the process."""
        tasks = [*self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._process.close()

    async def checked(
        self,
        make: Callable[[], str],
        param: str,
        tenant: str,
        params: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return the checked grammar of the document that `make` returns; `make` runs in a thread.

        `params`: the name of a grammar of the document |-> the request's parameter that it is of.
        Tenants take turns, so one tenant's slow grammars do not hold up those of others.

        Raises:
            InvalidRequest: the grammar cannot be enforced; says why, and names `param`.
            Overloaded: too many other grammars of this tenant are being prepared.
        """
        document = await asyncio.to_thread(make)
        if fault := too_long(document):  # of what a client wrote, much more may have become
            raise _unenforceable(param, fault)
        prepared = self._verdicts.get(document)
        if prepared is None:
            try:
                prepared = await self._prepared(document, tenant)
            except TokenizerError as error:
                raise _unenforceable(param, error.message) from error
        self._remember(document, prepared)
        if prepared.fault:
            where = f"in {prepared.pointer!r}, " if prepared.pointer else ""
            raise _unenforceable(params.get(prepared.part, param), where + prepared.fault)
        return prepared.grammar

    async def _prepared(self, document: str, tenant: str) -> Prepared:
        """Prepare a document once for all callers of a tenant; cancelling one affects no other."""
        key = tenant, document
        task = self._under_way.get(key)
        if task is None:
            if self._num_waiting[tenant] >= self._max_waiting:
                most = self._max_waiting
                raise Overloaded(
                    f"{most} other grammars of yours are being prepared; try again later"
                )
            task = asyncio.create_task(self._prepare(document, tenant))
            self._under_way[key] = task
            self._num_waiting[tenant] += 1
            task.add_done_callback(lambda _: self._done(document, tenant))
        try:
            wait_s = _WAIT_S if self._process.has_begun else BEGIN_S + _WAIT_S
            async with asyncio.timeout(wait_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Overloaded(
                f"the grammar was not prepared within {wait_s:g} s, since many others are; try "
                "again later"
            ) from None

    def _done(self, document: str, tenant: str) -> None:
        del self._under_way[tenant, document]
        self._num_waiting -= Counter([tenant])  # drops what is 0

    async def _prepare(self, document: str, tenant: str) -> Prepared:
        try:
            return await self._process.prepare(document, tenant)
        except GrammarFailed as error:
            return Prepared(fault=error.message)

    def _remember(self, document: str, prepared: Prepared) -> None:
        self._verdicts[document] = prepared
        self._verdicts.move_to_end(document)
        if len(self._verdicts) > _MAX_REMEMBERED:
            self._verdicts.popitem(last=False)


def _unenforceable(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param!r} cannot be enforced: {why}", param)
