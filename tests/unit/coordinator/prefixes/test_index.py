"""The index of who holds which prefix, against a naive model, and the hints made of it."""

from __future__ import annotations

import gc
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.nodes.registry import Member
from coordinator.prefixes.index import MAX_SOURCES, PrefixIndex, PromptHashes
from pdserve.protocol import (
    KvEvents,
    KvTier,
    LoadReport,
    NodeRole,
    NodeState,
    PrefixSource,
    Prompt,
)
from pdserve.protocol.requests import state_hashes
from pdserve.shared.errors import MalformedMessage
from pdserve.shared.introduction import is_introduced
from tests.fakes.hellos import LAYOUT, node_hello

PROMPT = list(range(40))
LONG_PROMPT = list(range(2000))


def make_member(
    node_id: str,
    block_size: int = 4,
    state: NodeState = NodeState.READY,
    slot: int = 0,
    state_bytes: int = 0,
) -> Member:
    hello = node_hello(
        node_id,
        NodeRole.PREFILL,
        incarnation=f"{node_id}-1",
        state=state,
        layout=replace(LAYOUT, block_size=block_size, state_bytes=state_bytes),
        introduction_key=node_id.encode(),
    )
    load = LoadReport(state=state, role=hello.role)
    return Member(hello, None, load, slot)  # type: ignore[arg-type]


def found_tokens(
    index: PrefixIndex, prompt: list[int], salt: str = ""
) -> dict[int, tuple[int, int]]:
    """(tokens held, tokens in the pool), by slot."""
    hits = index.lookup(PromptHashes(Prompt(prompt, salt)))
    tokens = zip(hits.held.tolist(), hits.in_pool.tolist(), strict=True)
    return dict(zip(hits.slots.tolist(), tokens, strict=True))


def sources_for(index: PrefixIndex, puller: Member) -> list[PrefixSource]:
    return index.prefix_sources(index.lookup(PromptHashes(Prompt(PROMPT))), puller)


def stored(num_tokens: int, block_size: int = 4, tier: KvTier = KvTier.POOL) -> KvEvents:
    return KvEvents(tier=tier, stored=Prompt(PROMPT[:num_tokens]).hashes(block_size))


Step = tuple[int, KvTier, frozenset[int], frozenset[int]]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(KvTier),
        st.frozensets(st.integers(0, 5)),
        st.frozensets(st.integers(0, 5)),
    ),
    max_size=12,
)


@given(steps=STEPS, removed=st.sets(st.integers(0, 2)), far=st.booleans())
def test_it_finds_where_what_members_hold_ends(
    steps: list[Step], removed: set[int], far: bool
) -> None:
    """Without gaps that is what a naive search finds; in a gap it may look at the far end."""
    prompt = LONG_PROMPT if far else PROMPT
    stride = 90 if far else 1  # between two of the blocks that are held
    members = [make_member(f"n{i}", block_size=(4, 4, 8)[i], slot=i) for i in range(3)]
    index = PrefixIndex()
    held: dict[tuple[int, KvTier], set[int]] = {}  # block numbers of the prompt
    for who, tier, new, gone in steps:
        chain = Prompt(prompt).hashes(members[who].hello.layout.block_size)
        new = frozenset(b * stride for b in new if b * stride < len(chain))
        gone = frozenset(b * stride for b in gone if b * stride < len(chain)) - new
        index.apply(
            members[who],
            KvEvents(tier=tier, stored=[chain[b] for b in new], evicted=[chain[b] for b in gone]),
        )
        held.setdefault((who, tier), set()).update(new)
        held[who, tier].difference_update(gone)
    for who in removed:
        index.remove(members[who])

    found = found_tokens(index, prompt)
    for who in {0, 1, 2} - removed:
        size = members[who].hello.layout.block_size
        pool = held.get((who, KvTier.POOL), set())
        both = pool | held.get((who, KvTier.HOST), set())
        in_any, in_pool = found.get(who, (0, 0))
        for num_tokens, blocks in ((in_any, both), (in_pool, pool)):
            num_blocks = num_tokens // size
            assert num_blocks >= leading(blocks)
            assert num_blocks not in blocks
            assert num_blocks == 0 or num_blocks - 1 in blocks
    assert not removed & found.keys()


@given(held=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=40))
def test_what_is_held_without_gaps_is_found_exactly(held: list[tuple[int, int]]) -> None:
    index, chain = PrefixIndex(), Prompt(LONG_PROMPT).hashes(4)
    expected = {}
    for slot, (in_pool, in_host) in enumerate(held):
        member = make_member(f"n{slot}", slot=slot)
        index.apply(member, KvEvents(tier=KvTier.POOL, stored=chain[:in_pool]))
        index.apply(member, KvEvents(tier=KvTier.HOST, stored=chain[:in_host]))
        if in_pool or in_host:
            expected[slot] = (max(in_pool, in_host) * 4, in_pool * 4)
    assert found_tokens(index, LONG_PROMPT) == expected


def leading(blocks: set[int]) -> int:
    return next(i for i in count() if i not in blocks)


@pytest.mark.usefixtures("collector_off")
def test_a_lookup_leaves_no_cycle_behind() -> None:
    index = PrefixIndex()
    index.apply(make_member("n0"), stored(20))
    gc.collect()
    for _ in range(20):
        assert found_tokens(index, PROMPT) == {0: (20, 20)}
    assert gc.collect() < 20


def test_nothing_is_left_of_a_member_that_is_gone() -> None:
    index, members = PrefixIndex(), [make_member(f"n{i}", slot=i) for i in range(3)]
    for member in members:
        index.apply(member, stored(40))
        index.apply(member, stored(40, tier=KvTier.HOST))
    for member in members:
        index.remove(member)
    assert not any(index._holders.values())
    assert not index._holdings
    again = make_member("again", slot=0)
    index.apply(again, stored(4))
    index.remove(members[0])  # the slot is another's now
    assert found_tokens(index, PROMPT) == {0: (4, 4)}


def test_another_salt_is_another_prefix() -> None:
    index, member = PrefixIndex(), make_member("n")
    index.apply(member, stored(40))
    assert found_tokens(index, PROMPT, "salt") == {}


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="16 bytes, not 3"):
        PrefixIndex().apply(make_member("n"), KvEvents(tier=KvTier.POOL, stored=[b"abc"]))


def test_no_hash_is_computed_far_beyond_what_is_held() -> None:
    index, member = PrefixIndex(), make_member("n")
    index.apply(member, stored(40))
    prompt = PromptHashes(Prompt(PROMPT + LONG_PROMPT))
    index.lookup(prompt)
    assert len(prompt.chain(4).known(0)) < 40


def test_hints_name_others_that_hold_more_longest_first() -> None:
    index = PrefixIndex()
    puller = make_member("puller", slot=9)
    for slot, num_tokens in enumerate((4, 12, 16, 24, 36)):
        index.apply(make_member(f"holder-{num_tokens}", slot=slot), stored(num_tokens))
    index.apply(puller, stored(12))
    sources = sources_for(index, puller)
    assert [(s.node.node_id, s.num_tokens) for s in sources] == [
        ("holder-36", 36),
        ("holder-24", 24),
        ("holder-16", 16),
    ]
    assert len(sources) == MAX_SOURCES
    assert is_introduced(b"holder-36", "holder-36-1", "puller-1", sources[0].node.introduction)


def test_no_hint_when_nobody_holds_more_than_can_be_used() -> None:
    """The last token of a prompt is computed in any case, and with it the whole of its block."""
    index = PrefixIndex()
    puller, holder = make_member("puller"), make_member("holder", slot=1)
    index.apply(holder, stored(40))
    index.apply(puller, stored(36))
    assert sources_for(index, puller) == []


def snapshot(num_tokens: int, tier: KvTier = KvTier.POOL) -> KvEvents:
    last = Prompt(PROMPT[:num_tokens]).hashes(4)[-1]
    return KvEvents(tier=tier, stored=state_hashes(last, 2))


def test_with_states_a_prefix_is_as_long_as_its_last_snapshot() -> None:
    """However much KV is behind it; and it goes with the first of its blocks."""
    index, plain = PrefixIndex(), make_member("plain")
    members = [make_member(f"n{slot}", slot=slot, state_bytes=100) for slot in (1, 2, 3)]
    index.apply(plain, stored(40))
    for member in members:
        index.apply(member, stored(36))
        index.apply(member, snapshot(12))
    index.apply(members[1], snapshot(28, KvTier.HOST))
    index.apply(members[2], snapshot(40))  # without all tokens before it
    assert found_tokens(index, PROMPT) == {0: (40, 40), 1: (12, 12), 2: (28, 12), 3: (12, 12)}
    index.apply(members[2], stored(40))
    assert found_tokens(index, PROMPT)[3] == (12, 12), "the last token is always computed"
    assert found_tokens(index, [*PROMPT, 1])[3] == (40, 40)
    index.remove(plain)
    assert [(s.node.node_id, s.num_tokens) for s in sources_for(index, members[0])] == [("n2", 28)]
    lost = snapshot(12).stored[:1]
    index.apply(members[0], KvEvents(tier=KvTier.POOL, evicted=lost))
    assert 1 not in found_tokens(index, PROMPT)
    index.remove(members[1])
    index.apply(make_member("another", slot=2), stored(40))
    assert found_tokens(index, PROMPT)[2] == (40, 40), "one without states has taken the slot"


def test_a_draining_node_is_a_source_and_a_sick_one_is_not() -> None:
    """Streams move away from the one; the other may hang."""
    index, puller = PrefixIndex(), make_member("puller")
    index.apply(make_member("sick", state=NodeState.SICK, slot=1), stored(40))
    assert sources_for(index, puller) == []
    index.apply(make_member("draining", state=NodeState.DRAINING, slot=2), stored(40))
    assert [source.node.node_id for source in sources_for(index, puller)] == ["draining"]


def test_a_holder_in_the_pool_comes_before_one_in_the_host_tier() -> None:
    index, puller = PrefixIndex(), make_member("puller")
    index.apply(make_member("host", slot=1), stored(40, tier=KvTier.HOST))
    index.apply(make_member("pool", slot=2), stored(40))
    sources = sources_for(index, puller)
    assert [source.node.node_id for source in sources] == ["pool", "host"]


def test_of_equal_holders_the_one_with_the_least_to_do_comes_first() -> None:
    index, puller = PrefixIndex(), make_member("puller")
    for slot, queued_tokens in ((1, 50), (2, 10), (3, 30)):
        member = make_member(f"{queued_tokens}-queued", slot=slot)
        member.load = LoadReport(
            state=NodeState.READY, role=NodeRole.PREFILL, queued_tokens=queued_tokens
        )
        index.apply(member, stored(40))
    names = [source.node.node_id for source in sources_for(index, puller)]
    assert names == ["10-queued", "30-queued", "50-queued"]


def test_holders_with_other_blocks_count_in_tokens() -> None:
    index, puller = PrefixIndex(), make_member("puller", block_size=16)
    index.apply(make_member("finer", slot=1), stored(28))
    (source,) = sources_for(index, puller)
    assert source.num_tokens == 28
    index.apply(puller, stored(16, block_size=16))
    assert sources_for(index, puller) == []
