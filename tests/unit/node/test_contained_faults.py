"""What goes wrong with the KV of one request ends that request: not its node, nor others there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from kv_transfer.exporter import Exporter
from kv_transfer.lifecycle import BlockStates
from pdserve.protocol import HandoffEnded, HandoffRecord, LegFailed, NodeRole
from pdserve.settings.config import EngineConfig
from prefill_node.handoff import PinnedBlocks
from tests.unit.node.one_node import Bench

BAD = "bad"


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(NodeRole.PREFILL, engine=EngineConfig(token_budget=8))
    yield bench
    bench.check_idle()
    await bench.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The requests for which no ticket can be issued."""
    issue, broken = Exporter.issue, set[str]()

    def issue_or_fail(
        self: Exporter,
        request_id: str,
        first_token: int,
        num_tokens: int,
        block_ids: Sequence[int],
        layers: range | None = None,
    ) -> bytes:
        if request_id in broken:
            raise ValueError("an odd fault")
        return issue(self, request_id, first_token, num_tokens, block_ids, layers)

    monkeypatch.setattr(Exporter, "issue", issue_or_fail)
    return broken


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("is_first", [True, False])
async def test_kv_that_cannot_be_announced_fails_its_own_request(
    bench: Bench, broken: set[str], num_steps: int, is_first: bool
) -> None:
    """In the first chunk of its prompt, in a later one, and with the handoff record."""
    for request_id in (BAD, "good") if is_first else ("good", BAD):
        bench.prefill(request_id, num_tokens=20)
    for _ in range(num_steps):
        bench.step()
    broken.add(BAD)
    bench.run()
    check_only_it_failed(bench)


async def test_a_late_subscriber_that_cannot_be_told_does_not_lose_its_session(
    bench: Bench, broken: set[str]
) -> None:
    bench.prefill("good")
    bench.prefill(BAD, is_heard=False)
    bench.run()
    broken.add(BAD)
    bench.services.announcer.subscribe(BAD, bench.hear)
    check_only_it_failed(bench)


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize(("books", "entry"), [(PinnedBlocks, "hold"), (BlockStates, "move")])
async def test_books_that_fail_half_way_fail_the_leg_and_free_the_blocks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, num_steps: int, books: type, entry: str
) -> None:
    """Then the handoff cannot be ended by the books, either."""

    def fail(*_: object) -> None:
        raise ValueError("an odd fault")

    bench.prefill(BAD, num_tokens=20)
    for _ in range(num_steps):
        bench.step()
    with monkeypatch.context() as patch:
        patch.setattr(books, entry, fail)
        bench.run()
    bench.prefill("good")
    bench.run()
    check_only_it_failed(bench)


def check_only_it_failed(bench: Bench) -> None:
    """The coordinator and the decode node are both told why."""
    failed = [m for m in bench.link.sent if isinstance(m, LegFailed)]
    assert [(m.request_id, m.code) for m in failed] == [(BAD, "internal_error")]
    assert "the handoff failed: ValueError: an odd fault" in failed[0].message
    ended = [m for m in bench.told if isinstance(m, HandoffEnded)]
    assert [(m.request_id, m.message) for m in ended] == [(BAD, failed[0].message)]
    assert [m.request_id for m in bench.told if isinstance(m, HandoffRecord)] == ["good"]
