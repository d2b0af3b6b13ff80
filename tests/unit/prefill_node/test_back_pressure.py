"""KV that nobody pulls takes a part of the pool and no more, and nothing ever waits for itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.node.sessions.server import HandoffMessage
from pdserve.protocol import Announcement, TokenBatch
from pdserve.settings.config import EngineConfig, HandoffConfig
from tests.matrix import examples
from tests.unit.prefill_node.bench import BLOCK, Bench, QuickRunner


@dataclass
class DecodeSide:
    """Subscribes to a request; settles it when it is told to."""

    bench: Bench
    request_id: str
    is_over: asyncio.Event = field(default_factory=asyncio.Event)  # published or ended

    def __post_init__(self) -> None:
        self.bench.handoffs.subscribe(self.request_id, self.hear)

    def hear(self, said: HandoffMessage) -> None:
        if not isinstance(said, Announcement):
            self.is_over.set()

    def settle(self) -> None:
        self.bench.handoffs.settle(self.request_id, self.hear, was_pulled=True)


async def turns(number: int = 50) -> None:
    """Let everything run until it waits."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(events: list[asyncio.Event]) -> None:
    async with asyncio.timeout(30):
        for event in events:
            await event.wait()
    await turns()


def make_bench(num_blocks: int, limit: float) -> Bench:
    return Bench(num_blocks, EngineConfig(), HandoffConfig(pinned_limit=limit, announce_bytes=1))


async def test_a_stuck_decode_node_pins_kv_up_to_the_limit_and_no_further() -> None:
    bench = make_bench(20, 0.5)
    async with bench.running(QuickRunner()):
        sides = [DecodeSide(bench, f"r{i}") for i in range(5)]
        for side in sides:
            bench.start(side.request_id, 3 * BLOCK)
        await until([side.is_over for side in sides[:3]])
        assert bench.metric("pinned_blocks") == 9  # 12 would be more than 10
        assert bench.metric("pinned_bytes") == 9 * bench.memory.block_bytes
        assert bench.node.num_waiting == 2
        assert bench.metric("throttled") == 1
        assert bench.metric("handoffs") == 5
        assert not sides[3].is_over.is_set()
        sides[1].settle()
        await until([sides[3].is_over])
        assert bench.node.num_waiting == 1
        assert bench.metric("throttled_seconds_total") > 0
        sides[0].settle()
        await until([sides[4].is_over])
        assert bench.metric("throttled") == 0
        for side in sides:
            side.settle()
        await turns()
    tokens = [message for message in bench.link.sent if isinstance(message, TokenBatch)]
    assert sum(len(batch.events) for batch in tokens) == 5, "token 1 of each"


async def test_cancelled_legs_let_others_in() -> None:
    bench = make_bench(20, 0.5)
    async with bench.running(QuickRunner()):
        sides = [DecodeSide(bench, f"r{i}") for i in range(4)]
        for side in sides:
            bench.start(side.request_id, 3 * BLOCK)
        await until([side.is_over for side in sides[:3]])
        assert bench.metric("throttled") == 1
        bench.node.cancel_leg("r0", "the client has gone")
        await until([sides[3].is_over])
        for side in sides:
            side.settle()
        await turns()


async def test_a_prompt_beyond_the_limit_is_let_in_alone() -> None:
    bench = make_bench(20, 0.5)
    async with bench.running(QuickRunner()):
        sides = [DecodeSide(bench, name) for name in ("small", "large", "after")]
        for side, num_blocks in zip(sides, (2, 15, 2), strict=True):
            bench.start(side.request_id, num_blocks * BLOCK)
        small, large, after = sides
        await until([small.is_over])
        assert not large.is_over.is_set()
        small.settle()
        await until([large.is_over])
        assert bench.metric("pinned_blocks") == 15
        assert not after.is_over.is_set(), "nobody goes past it, and nobody joins it"
        large.settle()
        await until([after.is_over])
        after.settle()
        await turns()


requests = st.tuples(
    st.integers(1, 40),  # prompt tokens, cut to what the pool can hold
    st.integers(0, 30),  # turns of the event loop until it is pulled, or cancelled
    st.sampled_from(["pulled", "given up", "cancelled", "cancelled and pulled", "lost"]),
)


@settings(max_examples=examples(60))
@given(
    wanted=st.lists(requests, min_size=1, max_size=12),
    num_blocks=st.integers(2, 12),
    limit=st.floats(0.05, 1.0),
    budget=st.integers(1, 40),
)
def test_everything_ends_in_the_smallest_of_pools(
    wanted: list[tuple[int, int, str]], num_blocks: int, limit: float, budget: int
) -> None:
    async def scenario() -> None:
        bench = Bench(
            num_blocks,
            EngineConfig(token_budget=budget),
            HandoffConfig(pinned_limit=limit, announce_bytes=1),
        )

        async def decode(index: int, num_turns: int, end: str) -> None:
            request_id = f"r{index}"
            side = DecodeSide(bench, request_id)
            if end.startswith("cancelled"):
                await turns(num_turns)
                bench.node.cancel_leg(request_id, "cancelled")
                if end == "cancelled and pulled":
                    side.settle()
                return
            if end != "given up":
                await side.is_over.wait()
            await turns(num_turns)
            if end == "lost":  # and another decode node comes instead
                bench.handoffs.unsubscribe(request_id, side.hear)
                side = DecodeSide(bench, request_id)
            side.settle()

        async with bench.running(QuickRunner()):
            decoding = []
            for index, (num_tokens, num_turns, end) in enumerate(wanted):
                bench.start(f"r{index}", min(num_tokens, num_blocks * BLOCK - 4))
                decoding.append(asyncio.create_task(decode(index, num_turns, end)))
            async with asyncio.timeout(30):
                await asyncio.gather(*decoding)
                while bench.node.engine.queues.running or len(bench.handoffs):
                    await asyncio.sleep(0)
            await turns()

    asyncio.run(scenario())
