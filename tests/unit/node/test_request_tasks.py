"""Tasks of requests: each is followed up once, or was given up and is waited for at the end."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from functools import partial

import pytest

from pdserve.engine.request import Request
from pdserve.node.preparation import RequestTasks
from pdserve.shared.errors import PdserveError
from tests.requests import make_request
from tests.waits import turn


class Bench:
    """Tasks that end when the test says so, and take a turn to end when they are cancelled."""

    def __init__(self) -> None:
        self.tasks: RequestTasks[str] = RequestTasks()
        self.may_end = asyncio.Event()
        self.ended: list[str] = []
        self.followed_up: list[tuple[str, str]] = []

    def start(self, request_id: str, result: str) -> None:
        request = request_named(request_id)
        self.tasks.start(request, self._work(result), self._follow_up)

    async def _work(self, result: str) -> str:
        try:
            await self.may_end.wait()
            return result
        finally:
            await self._end()
            self.ended.append(result)

    async def _end(self) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

    def _follow_up(self, request: Request, outcome: str | BaseException) -> None:
        assert isinstance(outcome, str)
        self.followed_up.append((request.request_id, outcome))


def request_named(request_id: str) -> Request:
    request = make_request(4)
    request.request_id = request_id
    return request


async def test_each_is_followed_up() -> None:
    bench = Bench()
    bench.start("a", "first")
    bench.start("b", "second")
    assert len(bench.tasks) == 2
    bench.may_end.set()
    await turn()
    assert sorted(bench.followed_up) == [("a", "first"), ("b", "second")]
    assert len(bench.tasks) == 0


@pytest.mark.parametrize("is_over", [False, True])
async def test_an_id_may_come_again_once_it_was_given_up(is_over: bool) -> None:
    bench = Bench()
    bench.start("a", "first")
    await turn()
    if is_over:
        bench.may_end.set()
        await asyncio.sleep(0)  # it is about to end
    bench.tasks.cancel("a")
    bench.start("a", "second")
    bench.may_end.set()
    await turn()
    assert bench.ended == ["first", "second"]
    assert bench.followed_up == [("a", "second")]
    bench.tasks.cancel("a")  # too late: it is not known any more


async def test_the_end_waits_for_all_even_those_given_up_before() -> None:
    bench = Bench()
    bench.start("a", "first")
    bench.start("b", "second")
    await turn()
    bench.tasks.cancel("a")
    await bench.tasks.close()
    assert sorted(bench.ended) == ["first", "second"]
    assert bench.followed_up == []
    assert len(bench.tasks) == 0


async def test_a_failure_after_giving_up_is_nobodys_concern() -> None:
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    tasks: RequestTasks[None] = RequestTasks()
    tasks.start(request_named("r"), fail_when_cancelled(), partial(pytest.fail, "it was given up"))
    await turn()
    tasks.cancel("r")
    await turn()
    gc.collect()  # asyncio complains about an exception when its task is freed
    assert unheard == []


async def test_a_wait_that_is_cancelled_by_itself_fails_its_request() -> None:
    outcomes: list[object] = []
    tasks: RequestTasks[None] = RequestTasks()
    waited_for: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks.start(request_named("r"), wait_for(waited_for), lambda _, end: outcomes.append(end))
    await turn()
    waited_for.cancel()
    await turn()
    (outcome,) = outcomes
    assert isinstance(outcome, PdserveError)
    assert "was cancelled" in outcome.message
    assert len(tasks) == 0


async def wait_for(waited_for: asyncio.Future[None]) -> None:
    await waited_for


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("what it waited for is gone") from None
