"""One node, both services: legs of either kind at any time, and a role that can change."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.cuda.pool import PrivatePool
from pdserve.node.memory.kv_memory import prefill_refusal
from pdserve.node.reports.gauges import load_report
from pdserve.protocol import (
    HandoffEnded,
    HandoffRecord,
    LegFailed,
    NodeAddress,
    NodeRole,
    NodeState,
    PrefixSource,
    TokenBatch,
)
from pdserve.settings.config import NodeConfig
from pdserve.settings.speculation import SpeculationConfig, no_drafts
from pdserve.shared.errors import PdserveError
from tests.matrix import examples
from tests.requests import make_request
from tests.unit.node.one_node import LAYOUT, MAX_TOKENS, NUM_BLOCKS, Bench, Link

P, D = NodeRole.PREFILL, NodeRole.DECODE


def output(num_prompt_tokens: int = 9, num_tokens: int = MAX_TOKENS) -> list[int]:
    """What the model of these tests says."""
    return list(range(num_prompt_tokens, num_prompt_tokens + num_tokens))


@pytest.mark.parametrize("role", [P, D])
async def test_legs_of_either_kind_are_served_in_either_role(role: NodeRole) -> None:
    bench = Bench(role)
    bench.prefill("p")
    bench.decode("d")
    bench.run()
    assert bench.link.tokens_of("p") == output(num_tokens=1)
    assert bench.link.tokens_of("d") == output()
    bench.check_idle()
    await bench.close()


@pytest.mark.parametrize("role", [P, D])
async def test_a_change_of_role_in_mid_stream_is_not_noticed_by_it(role: NodeRole) -> None:
    bench = Bench(role)
    other = D if role is P else P
    bench.decode("d")
    bench.prefill("p", num_tokens=70)
    bench.step()
    bench.services.set_role(other)
    bench.decode("late", num_tokens=5)  # was under way
    bench.step()
    bench.services.set_role(role)
    bench.run()
    assert bench.link.tokens_of("d") == output()
    assert bench.link.tokens_of("late") == output(5)
    assert bench.link.tokens_of("p") == output(70, 1)
    bench.check_idle()
    await bench.close()


async def test_the_role_chooses_the_policy_and_is_reported() -> None:
    bench = Bench(D)
    engine = bench.parts.engine
    policy = engine.policy
    bench.services.set_role(P)
    assert engine.policy is not policy
    assert bench.num_reports == 1
    assert load_report(bench.services, bench.parts, NodeState.READY, 1.0, 0.0).role is P
    bench.services.set_role(P)
    assert bench.num_reports == 2, "a node on standby begins with the role that it has"
    bench.services.set_role(D)
    assert engine.policy is policy
    assert bench.num_reports == 3
    await bench.close()


async def test_a_node_that_cannot_prefill_for_others_stays_what_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    private = PrivatePool(NUM_BLOCKS, LAYOUT.block_bytes)
    bench = Bench(D, refusal=prefill_refusal(NodeConfig(), private))
    with caplog.at_level(logging.WARNING):
        bench.services.set_role(P)
    assert bench.services.role is D
    assert bench.num_reports == 0
    assert "n stays a decode node: its KV is in memory that no other node can read" in caplog.text
    assert prefill_refusal(NodeConfig(), bench.memory) == ""
    assert "both phases" in prefill_refusal(NodeConfig(multiplexed=True), bench.memory)
    await bench.close()


@pytest.mark.parametrize("role", [P, D])
async def test_tokens_of_a_step_are_one_message_and_go_before_announcements(
    role: NodeRole,
) -> None:
    bench = Bench(role)
    bench.decode("d")
    bench.step()
    bench.prefill("p")
    bench.told.clear()
    rows = bench.step()
    assert len(rows) == 2, "a stream and a prompt together"
    first, *others = bench.told
    assert isinstance(first, TokenBatch)
    assert {event.request_id for event in first.each()} == {"d", "p"}
    assert any(isinstance(message, HandoffRecord) for message in others)
    assert not any(isinstance(message, TokenBatch) for message in others)
    bench.run()
    bench.check_idle()
    await bench.close()


@pytest.mark.parametrize(("short_len", "is_long"), [(0, True), (14, False), (15, True)])
async def test_a_request_that_came_as_the_wrong_kind_is_refused(
    short_len: int, is_long: bool
) -> None:
    """It would be rotated otherwise than on the other nodes. It is of 15 tokens at most."""
    bench = Bench(P, short_len=short_len)
    bench.prefill("r", 9, is_heard=False, is_long=is_long)
    (refusal,) = bench.link.sent
    assert isinstance(refusal, LegFailed)
    assert f"the longest short one has {short_len or 'any'} tokens" in refusal.message
    bench.prefill("r", 9, is_long=not is_long)
    bench.run()
    bench.check_idle()
    await bench.close()


async def test_an_id_is_taken_whichever_service_has_it() -> None:
    bench = Bench(P)
    bench.prefill("r")
    bench.decode("r")
    (refusal,) = bench.link.sent
    assert isinstance(refusal, LegFailed)
    assert "r is in use" in refusal.message
    bench.run()
    bench.check_idle()
    await bench.close()


async def test_a_lost_coordinator_loses_both_kinds_and_no_other_one_any() -> None:
    bench = Bench(P)
    lost = Link([])
    for kind, name in ((bench.prefill, "p"), (bench.decode, "d")):
        kind(f"{name}-lost", link=lost)
        kind(f"{name}-kept")
    bench.step()
    bench.services.coordinator_lost(lost)
    bench.run()
    assert bench.link.tokens_of("d-kept") == output()
    assert bench.link.tokens_of("p-kept") == output(num_tokens=1)
    bench.check_idle()
    await bench.close()


async def test_a_failed_step_fails_both_kinds() -> None:
    bench = Bench(D)
    bench.prefill("p")
    bench.decode("d")
    engine = bench.parts.engine
    rows = engine.begin_step()
    requests = [row.request for row in rows]
    engine.abandon_step(rows, requests)
    bench.services.requests_failed(requests, PdserveError("no luck"))
    failed = [message for message in bench.link.sent if isinstance(message, LegFailed)]
    assert {message.request_id for message in failed} == {"p", "d"}
    assert any(isinstance(message, HandoffEnded) for message in bench.told)
    bench.check_idle()
    await bench.close()


async def test_prompts_count_as_queued_before_the_engine_has_them() -> None:
    bench = Bench(P)
    elsewhere = NodeAddress(node_id="q", incarnation="1", session_address="127.0.0.1:9")
    bench.prefill("in the engine", num_tokens=9)
    bench.prefill("compiled first", num_tokens=20, grammar='start: "a"')
    source = PrefixSource(node=elsewhere, num_tokens=16)
    bench.prefill("fetched first", num_tokens=30, prefix_sources=[source])
    report = load_report(bench.services, bench.parts, NodeState.READY, 1.0, 0.0)
    assert len(bench.parts.engine.queues.waiting) == 1
    assert (report.waiting_requests, report.queued_tokens) == (3, 9 + 20 + 30)
    stream = make_request(40, output_token_ids=[1], prefix_sources=[source])
    bench.parts.preparation.recall(stream)
    assert bench.services.queued_tokens == 9 + 20 + 30, "of a stream, no prompt is to be computed"
    bench.parts.preparation.cancel(stream.request_id)
    for name in ("compiled first", "fetched first"):
        bench.services.cancel_leg(name, "cancelled")
    assert bench.services.queued_tokens == 9
    bench.run()
    assert bench.services.queued_tokens == 0
    bench.check_idle()
    await bench.close()


async def test_who_listens_to_steps_hears_of_all_rows() -> None:
    bench = Bench(D)
    heard: list[int] = []
    bench.services.on_step(lambda report: heard.append(len(report.rows)))
    bench.decode("d")
    bench.prefill("p")
    bench.run()
    assert sum(heard) == MAX_TOKENS + 1
    await bench.close()


MOVES = st.lists(
    st.sampled_from(["prefill", "decode", "flip", "step", "step", "cancel"]), max_size=40
)


@given(moves=MOVES)
@settings(max_examples=examples(40))
def test_whenever_the_role_changes_every_leg_is_served(moves: list[str]) -> None:
    async def run() -> None:
        bench = Bench(P)
        lengths: dict[str, int] = {}
        cancelled: set[str] = set()
        for number, move in enumerate(moves):
            name = f"{move}-{number}"
            match move:
                case "flip":
                    bench.services.set_role(D if bench.services.role is P else P)
                case "step":
                    bench.step()
                case "cancel" if lengths:
                    victim = list(lengths)[number % len(lengths)]
                    cancelled.add(victim)
                    bench.services.cancel_leg(victim, "the client has gone")
                case "prefill":
                    lengths[name] = 3 + 7 * number % 40
                    bench.prefill(name, lengths[name])
                case "decode":
                    lengths[name] = 3 + 7 * number % 40
                    bench.decode(name, lengths[name])
        bench.run()
        for name, length in lengths.items():
            if name not in cancelled:
                num_tokens = 1 if name.startswith("prefill") else MAX_TOKENS
                assert bench.link.tokens_of(name) == output(length, num_tokens)
        bench.check_idle()
        await bench.close()

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "told"), [("auto", ""), ("off", "speculation.mode is off")])
def test_a_node_says_why_it_guesses_nothing(mode: str, told: str) -> None:
    assert no_drafts(SpeculationConfig(mode=mode)) == told
    of_states = "the model has states, which wrong drafts would change for good"
    assert no_drafts(SpeculationConfig(mode=mode), has_states=True) == (told or of_states)
