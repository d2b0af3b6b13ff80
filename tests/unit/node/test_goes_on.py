"""What goes on on a node: streams of other nodes, streams without a coordinator, and their KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec.structs import replace

from pdserve.engine.request import next_due_s
from pdserve.node.legs import KeptScores, request_of
from pdserve.protocol import (
    Claim,
    Claimed,
    DecodeLeg,
    FinishReason,
    LegFailed,
    NodeAddress,
    NodeRole,
    Prefetch,
    Prefetched,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    Slo,
    TokenBatch,
    TokenEvent,
    TokenLogprobs,
)
from pdserve.shared.errors import OutOfBlocks
from tests.unit.node.one_node import MAX_TOKENS, Bench, Link
from tests.unit.node.test_roles import output

PROMPT = list(range(9))


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(NodeRole.DECODE)
    yield bench
    bench.check_idle()
    await bench.close()


def leg(
    request_id: str,
    *,
    emitted: int = 0,
    is_claimable: bool = False,
    source: NodeAddress | None = None,
    slo: Slo | None = None,
    logprobs: int | None = None,
    output_logprobs: PromptLogprobs | None = None,
) -> DecodeLeg:
    return DecodeLeg(
        request_id=request_id,
        prompt=Prompt(PROMPT),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=logprobs),
        output_logprobs=output_logprobs,
        output_token_ids=output(num_tokens=emitted),
        is_claimable=is_claimable,
        source=source,
        slo=slo or Slo(),
    )


def tokens(link: Link) -> list[tuple[int, list[int]]]:
    batches = [message for message in link.sent if isinstance(message, TokenBatch)]
    return [(event.index, event.token_ids) for batch in batches for event in batch.each()]


# ---- of another node ---------------------------------------------------------------------------


@pytest.mark.parametrize("emitted", [1, 3, MAX_TOKENS - 1])
async def test_a_stream_of_another_node_goes_on_after_its_last_token(
    bench: Bench, emitted: int
) -> None:
    bench.services.start_decode(leg("r~1", emitted=emitted), bench.link)
    bench.run()
    expected = [(i, [token]) for i, token in enumerate(output())]
    assert tokens(bench.link) == expected[emitted:]


@pytest.mark.parametrize("wrong", ["complete", "not a token", "takes over what has no output"])
async def test_what_cannot_go_on_is_refused(bench: Bench, wrong: str) -> None:
    source = NodeAddress(node_id="p", incarnation="1", session_address="p:1")
    match wrong:
        case "complete":
            bad = leg("r", emitted=MAX_TOKENS)
        case "takes over what has no output":
            bad = replace(leg("r", source=source), takes_over="r")
        case _:
            bad = DecodeLeg(
                request_id="r",
                prompt=Prompt(PROMPT),
                sampling=SamplingParams(max_tokens=4),
                output_token_ids=[-1],
            )
    bench.services.start_decode(bad, bench.link)
    (failure,) = bench.link.sent
    assert isinstance(failure, LegFailed)
    assert failure.code == "invalid_request"


def test_its_next_token_is_due_when_its_leg_says_and_the_others_a_tpot_after_each_other() -> None:
    request = request_of(leg("r", emitted=3, slo=Slo(ttft_s=0.5, tpot_s=0.1)), now_s=10.0)
    assert next_due_s(request) == 10.5
    request.output_token_ids += [1, 1]
    assert next_due_s(request) == pytest.approx(10.7)


async def test_kv_of_a_stream_that_may_come_is_looked_for_and_the_end_of_it_told(
    bench: Bench,
) -> None:
    bench.services.prefetch(Prefetch(request_id="r~1", prompt=Prompt(PROMPT)), bench.link)
    await asyncio.sleep(0)
    while not bench.link.sent:
        await asyncio.sleep(0)
    assert bench.link.sent == [Prefetched(request_id="r~1", num_tokens=0)]


# ---- without a coordinator ---------------------------------------------------------------------


async def test_a_claimable_stream_outlives_its_coordinator(bench: Bench) -> None:
    other = Link([])
    bench.services.start_decode(leg("r~2", is_claimable=True), bench.link)
    bench.services.start_decode(leg("not"), bench.link)
    for _ in range(3):
        bench.step()
    bench.services.coordinator_lost(bench.link)
    heard = len(bench.link.sent)
    bench.step()
    bench.services.claim(Claim(request_id="r"), other)
    bench.step()
    assert len(bench.link.sent) == heard
    (claimed,) = other.sent
    assert isinstance(claimed, Claimed)
    assert claimed.token_ids == output()[: len(claimed.token_ids)]
    assert len(claimed.token_ids) == len(tokens(bench.link)) // 2 + 1
    assert claimed.finish_reason is None


async def test_one_that_ends_meanwhile_is_claimed_as_a_whole_once(bench: Bench) -> None:
    other = Link([])
    guessed = replace(leg("r", is_claimable=True), accepted=2, refused=1)  # on its former node
    bench.services.start_decode(guessed, bench.link)
    bench.step()
    bench.services.coordinator_lost(bench.link)
    bench.run()
    bench.check_idle()
    for _ in range(2):
        bench.services.claim(Claim(request_id="r"), other)
    assert other.sent == [
        Claimed(
            request_id="r",
            token_ids=output(),
            finish_reason=FinishReason.LENGTH,
            accepted=2,
            refused=1,
        ),
        Claimed(request_id="r"),
    ]


async def test_nobody_claims_it() -> None:
    bench = Bench(NodeRole.DECODE, orphan_s=0.0)
    bench.services.start_decode(leg("r", is_claimable=True), bench.link)
    bench.step()
    bench.services.coordinator_lost(bench.link)
    assert len(bench.services.legs) == 1
    while len(bench.services.legs):
        await asyncio.sleep(0)
    bench.run()
    bench.check_idle()
    await bench.close()


async def test_without_token_one_there_is_nothing_to_keep(bench: Bench) -> None:
    bench.services.start_decode(leg("r", is_claimable=True), bench.link)
    bench.services.coordinator_lost(bench.link)
    bench.run()


async def test_a_stream_that_is_being_taken_over_goes_on_without_its_coordinator(
    bench: Bench,
) -> None:
    """It may have ended on its node, for this one: so nobody else would go on with it."""
    other, emitted = Link([]), output(num_tokens=3)
    source = NodeAddress("s", "i", "127.0.0.1:1")
    taken = replace(leg("r~2", emitted=3, is_claimable=True, source=source), takes_over="r~1")
    bench.services.start_decode(taken, bench.link)
    bench.services.coordinator_lost(bench.link)
    assert "r~2" in bench.services.legs
    request = bench.services._stream("r~2")
    assert request is not None
    request.output_token_ids += [7, 8]  # with its record, whose node reports them
    bench.services.legs.add_event(TokenEvent(request_id="r~2", index=5, token_ids=[9]))
    bench.services.legs.flush()
    bench.services.claim(Claim(request_id="r"), other)
    assert other.sent == [Claimed(request_id="r", token_ids=[*emitted, 7, 8, 9])]
    assert "r~2" not in bench.services.legs


async def test_a_kept_stream_that_fails_is_forgotten(bench: Bench) -> None:
    other = Link([])
    bench.services.start_decode(leg("r", is_claimable=True), bench.link)
    bench.step()
    bench.services.coordinator_lost(bench.link)
    bench.services.legs.fail("r", OutOfBlocks("none left"))
    bench.parts.engine.cancel("r")
    bench.services.claim(Claim(request_id="r"), other)
    assert other.sent == [Claimed(request_id="r")]


async def test_a_claim_comes_before_the_node_knows_that_the_coordinator_is_lost(
    bench: Bench,
) -> None:
    other = Link([])
    bench.services.start_decode(leg("r~a", is_claimable=True), bench.link)
    bench.services.start_decode(leg("s~a"), bench.link)
    bench.services.start_decode(leg("s2"), bench.link)
    for _ in range(2):
        bench.step()
    bench.services.claim(Claim(request_id="r"), other)
    bench.services.claim(Claim(request_id="s"), other)
    of_r, of_s = other.sent
    assert isinstance(of_r, Claimed)
    assert of_r.token_ids == output()[: len(of_r.token_ids)] != []
    assert of_s == Claimed(request_id="s"), "its tokens cannot be told again"
    failures = [message for message in bench.link.sent if isinstance(message, LegFailed)]
    assert [(f.request_id, f.code) for f in failures] == [
        ("r~a", "request_cancelled"),
        ("s~a", "request_cancelled"),
    ]
    bench.services.start_decode(leg("s~b", is_claimable=True), other)
    bench.run()
    assert tokens(other) == [(i, [token]) for i, token in enumerate(output())]
    bench.services.coordinator_lost(bench.link)


# ---- with log-probabilities --------------------------------------------------------------------


def scores(link: Link, request_id: str) -> list[TokenLogprobs]:
    """All that the node has said."""
    batches = [message for message in link.sent if isinstance(message, TokenBatch)]
    events = [e for batch in batches for e in batch.each() if e.request_id == request_id]
    return [each for event in events for each in event.logprobs]


def claim(bench: Bench, request_id: str) -> Claimed:
    other = Link([])
    bench.services.claim(Claim(request_id=request_id), other)
    (claimed,) = other.sent
    assert isinstance(claimed, Claimed)
    return claimed


def whole(bench: Bench, num_top: int) -> list[TokenLogprobs]:
    """Of the same stream, undisturbed."""
    link = Link([])
    bench.services.start_decode(leg("whole", logprobs=num_top), link)
    bench.run()
    return scores(link, "whole")


@pytest.mark.parametrize("is_known", [True, False], ids=["lost", "not yet known to be lost"])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_a_stream_is_claimed_with_its_log_probabilities(
    bench: Bench, num_top: int, is_known: bool
) -> None:
    """And once more after it has gone on, which it does with those that it has."""
    expected = whole(bench, num_top)
    bench.services.start_decode(leg("r~a", is_claimable=True, logprobs=num_top), bench.link)
    bench.step()
    if is_known:
        bench.services.coordinator_lost(bench.link)
    bench.step()
    first = claim(bench, "r")
    assert first.logprobs == PromptLogprobs.of(expected[: len(first.token_ids)])
    emitted = len(first.token_ids)
    assert emitted > 0
    goes_on = leg(
        "r~b1",
        emitted=emitted,
        is_claimable=True,
        logprobs=num_top,
        output_logprobs=first.logprobs,
    )
    bench.services.start_decode(goes_on, bench.link)
    bench.run_until_tokens("r~b1", emitted + 1)
    bench.services.coordinator_lost(bench.link)
    bench.run()
    second = claim(bench, "r")
    assert second.token_ids == output()
    assert second.logprobs == PromptLogprobs.of(expected)


async def test_what_comes_without_all_its_log_probabilities_is_not_kept(bench: Bench) -> None:
    bench.services.start_decode(leg("r~1", emitted=2, is_claimable=True, logprobs=1), bench.link)
    bench.step()
    bench.services.coordinator_lost(bench.link)
    assert claim(bench, "r") == Claimed(request_id="r")
    bench.run()


async def test_beyond_the_bound_the_stream_with_the_most_cannot_be_claimed(bench: Bench) -> None:
    bench.parts.legs.scores = KeptScores(most=9)
    bench.services.start_decode(leg("many~1", is_claimable=True, logprobs=3), bench.link)
    bench.services.start_decode(leg("few~1", is_claimable=True, logprobs=0), bench.link)
    bench.run_until_tokens("many~1", 2)
    bench.services.coordinator_lost(bench.link)
    bench.run_until_tokens("few~1", 4)
    few = claim(bench, "few")
    assert few.logprobs is not None
    assert len(few.logprobs) == len(few.token_ids) > 0
    assert claim(bench, "many") == Claimed(request_id="many"), "its tokens alone are not it"
    bench.run()
