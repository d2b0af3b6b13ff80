"""What is called at every tick: until it is left, and not silently no more."""

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


async def test_an_error_is_logged_with_what_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    async with ticking(0.001, "counting", fail):
        await until(lambda: "counting has ended" in caplog.text)
    assert "ValueError: a bug" in caplog.text


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
