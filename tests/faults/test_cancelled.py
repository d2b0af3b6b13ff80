"""Whatever mix of finished, cancelled and refused requests there was: nothing is held afterwards.

The fixtures check every node's blocks, legs and queues after each test, within three seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import pytest

from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import SETTLE_S, Fleet
from tests.conftest import MAX_INFLIGHT

LONG = 12_000  # tokens of a prompt that takes a while


@pytest.mark.long  # each moment by itself is by default
async def test_any_mix_at_random_moments(fleet: Fleet, client: Client) -> None:
    choice = random.Random(20)
    outcomes: Counter[str] = Counter()

    async def finish() -> str:
        max_tokens = choice.randint(1, 30)
        output = await client.complete(make_prompt(choice.randint(1, 200)), max_tokens)
        assert len(output.tokens) == max_tokens
        return "finished"

    async def be_refused() -> str:
        fields = choice.choice(
            [{"temperature": 9}, {"max_tokens": 32768}, {"logit_bias": {"x": 1}}]
        )
        output = await client.complete(make_prompt(10), **({"max_tokens": 5} | fields))
        assert output.status == 400
        assert output.error is not None
        return "refused"

    async def leave_after_a_while() -> str:
        length, max_tokens = choice.choice([(3000, 5), (800, 100), (30, 20_000), (1, 1)])
        whole = {"stream": False, "stream_options": None}
        fields = whole if choice.random() < 0.3 else {}
        num_answers = choice.choice([1, 1, 3])
        follower = Follower(client, make_prompt(length), max_tokens, n=num_answers, **fields)
        await asyncio.sleep(choice.random() ** 2 / 2)  # the moment is what is random here
        await follower.hang_up()
        return "left in time" if follower.output.finish_reason else "left"

    async def leave_in_mid_stream() -> str:
        follower = Follower(client, make_prompt(choice.randint(1, 100)), 20_000)
        await follower.reached(choice.randint(1, 10))
        await follower.hang_up()
        return "left in mid-stream"

    kinds = [finish, be_refused, leave_after_a_while, leave_after_a_while, leave_in_mid_stream]

    async def one_client() -> None:
        for _ in range(6):
            outcomes[await choice.choice(kinds)()] += 1

    await asyncio.gather(*(one_client() for _ in range(12)))
    assert outcomes.total() == 72
    assert min(outcomes[kind] for kind in ("finished", "refused", "left", "left in mid-stream")) > 3


async def test_leaving_while_tokens_are_being_written(fleet: Fleet, client: Client) -> None:
    """Some writes fail because the client has gone, some handlers are cancelled, some are both."""

    async def leave(index: int) -> None:
        follower = Follower(client, make_prompt(10, index), 20_000)
        await follower.reached(1 + index % 7)
        await follower.hang_up()

    for _ in range(2):
        await asyncio.gather(*(leave(index) for index in range(30)))
        await fleet.assert_baseline()


async def test_leaving_the_prefill_queue_and_the_running_prefill(
    fleet: Fleet, client: Client
) -> None:
    prompts = [make_prompt(LONG, (time.monotonic(), i)) for i in range(3)]
    followers = [Follower(client, prompt, 5) for prompt in prompts]
    await fleet.wait_for(
        "prefill-0", lambda g: 2 * LONG < g["queue_tokens"] < 3 * LONG and g["pinned_blocks"] > 0
    )
    await followers[1].hang_up()  # waits in the queue
    await followers[0].hang_up()  # is being prefilled, and pulled
    assert len((await followers[2].end()).tokens) == 5


async def test_a_cancelled_request_is_not_computed_to_its_end(fleet: Fleet, client: Client) -> None:
    follower = Follower(client, make_prompt(20), 20_000)
    name = (await follower.reached(3)).decode_node or ""
    steps = (await fleet.gauges(name))["steps"]
    await follower.hang_up()
    await fleet.assert_baseline()
    assert (await fleet.gauges(name))["steps"] < steps + 10_000


@pytest.mark.long  # a coordinator alone does it by default
async def test_too_many_at_once_are_refused_at_once(fleet: Fleet, client: Client) -> None:
    followers = [Follower(client, make_prompt(20, i), 3500) for i in range(MAX_INFLIGHT + 30)]
    begun = [follower.reached(1) for follower in followers]
    await asyncio.gather(*begun, return_exceptions=True)  # to the refused ones, no token comes
    refused = [follower.output for follower in followers if follower.output.status != 200]
    assert len(refused) == 30
    for output in refused:
        assert output.status == 429
        assert output.error is not None
        assert output.error["code"] == "overloaded"
        assert output.retry_after is not None
    await asyncio.gather(*(follower.hang_up() for follower in followers))


async def test_the_connection_breaks_before_the_body_is_complete(
    fleet: Fleet, client: Client
) -> None:
    host, port = fleet.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
    for cut in (5, len(head) - 1, len(head)):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head[:cut])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    async with asyncio.timeout(SETTLE_S):
        assert (await client.complete(make_prompt(5), 5)).tokens
