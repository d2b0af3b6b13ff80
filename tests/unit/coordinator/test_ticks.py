"""What is called at every tick: until it is left, whatever it raises."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.ticks import ticking
from tests.waits import turn, until


async def test_it_is_called_again_and_again_until_it_is_left() -> None:
    calls: list[int] = []
    async with ticking(0.001, "counting", lambda: calls.append(1)):
        await until(lambda: len(calls) > 2)
    await turn()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_is_logged_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("a bug")

    async with ticking(0.001, "counting", fail):
        await until(lambda: len(calls) > 2)
    assert caplog.text.count("ValueError: a bug") == 1
    assert caplog.text.count("counting failed") == 1


async def test_nothing_is_called_before_there_is_anything_to_look_at() -> None:
    begins, calls, others = asyncio.Event(), list[int](), list[int]()
    async with (
        ticking(0.001, "waiting", lambda: calls.append(1), begins),
        ticking(0.001, "counting", lambda: others.append(1)),
    ):
        await until(lambda: len(others) > 2)
        assert not calls
        begins.set()
        await until(lambda: len(calls) > 2)
