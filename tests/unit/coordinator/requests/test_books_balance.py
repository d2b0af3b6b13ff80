"""After thousands of requests that end in every way, nothing is counted that is not there."""

from __future__ import annotations

import pytest

from pdserve.protocol import TokenEvent
from pdserve.settings.config import Mode
from pdserve.shared.errors import PdserveError
from tests.matrix import matrix
from tests.unit.coordinator.requests.played_cluster import PlayedCluster


@pytest.mark.parametrize("seed", matrix(range(3), 1))
@pytest.mark.parametrize("mode", matrix(["adaptive", "disaggregated", "colocated"], 1))
async def test_all_books_balance_in_the_end(mode: Mode, seed: int) -> None:
    cluster = PlayedCluster(mode, seed)
    for _ in range(10):
        cluster.join()
    await cluster.live(2000)
    if seed == 0:
        await end_without_nodes(cluster)
    else:
        await cluster.finish()
    assert len(cluster.told) > 80
    assert cluster.num_refused > 50
    assert_each_was_told_its_end_once(cluster)
    errors = {told[-1].code for _, told in cluster.told if isinstance(told[-1], PdserveError)}
    assert errors <= {
        "request_cancelled",
        "node_lost",
        "request_quarantined",
        "peer_lost",
        "no_node_available",  # an answer was to begin when there was no node, for too long
    }
    assert sum(running.num_interruptions > 0 for running, _ in cluster.told) > 20
    assert_nothing_is_booked(cluster)
    assert_nothing_is_admitted(cluster)


async def end_without_nodes(cluster: PlayedCluster) -> None:
    """Who had nodes waits for others, as those in line do."""
    while cluster.nodes:
        cluster.lose()
    await cluster.settle()
    for running, told in cluster.told:
        assert running.dispatch is None or has_ended(told)
        running.cancel("the end")
    await cluster.settle()


def has_ended(told: list[TokenEvent | Exception]) -> bool:
    return bool(told) and is_end(told[-1])


def is_end(event: TokenEvent | Exception) -> bool:
    return isinstance(event, Exception) or event.finish_reason is not None


def assert_each_was_told_its_end_once(cluster: PlayedCluster) -> None:
    """Every listener heard its tokens in order, and then how it ended."""
    num_finished = 0
    for running, told in cluster.told:
        assert has_ended(told), f"{running.request.request_id} was told {told}"
        *before, last = told
        tokens = [event for event in told if isinstance(event, TokenEvent)]
        indices = [event.index + i for event in tokens for i in range(len(event.token_ids))]
        assert indices == list(range(running.num_tokens))
        assert [token_id for event in tokens for token_id in event.token_ids] == indices
        assert not any(is_end(event) for event in before)
        num_finished += isinstance(last, TokenEvent)
    assert 20 < num_finished < len(cluster.told), "some finished, some did not"


def assert_nothing_is_booked(cluster: PlayedCluster) -> None:
    """The router expects no prompt, no leg and no handoff any more."""
    assert cluster.flow.num_inflight == 0
    assert not cluster.flow._by_leg
    resumes = cluster.flow.resumes
    assert not resumes._troubles
    assert not resumes._waiting
    assert not resumes._under_way
    assert resumes._on_trial is None
    books = cluster.router._books
    queues, decodes = books.queues, books.decodes
    for booked in (
        queues.num_prompts,
        queues.tokens,
        queues._seconds,
        queues._head_s,
        decodes.legs,
        decodes._active,
        decodes._active_context,
        decodes.forecast.requests,
        decodes.forecast.tokens,
    ):
        assert not booked.any()
    assert not queues._columns
    assert not any(queue.prompts for queue in queues._queues.values())
    assert not any(books.handoffs._begun_s.values())


def assert_nothing_is_admitted(cluster: PlayedCluster) -> None:
    """Every place among the requests in flight, and in the line, is free again."""
    admission = cluster.admission
    assert len(admission._in_flight) == len(admission.line) == admission.line.num_payers == 0
    assert not admission.line._num_waiting
    assert all(entry.num_inflight == 0 for entry in admission._presence._classes.values())
