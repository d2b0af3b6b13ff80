"""The index of who holds which prefix, against a naive model, and the hints made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.prefix_index import MAX_SOURCES, HeldPrefix, PrefixIndex, prefix_sources
from coordinator.registry import Member
from pdserve.block_hash import hash_chain
from pdserve.errors import MalformedMessage
from pdserve.introduction import is_introduced
from pdserve.kv_layout import KvDtype, KvLayout
from pdserve.protocol import KvEvents, KvTier, LoadReport, NodeHello, NodeRole, NodeState

PROMPT = list(range(40))


def make_member(node_id: str, block_size: int = 4, state: NodeState = NodeState.READY) -> Member:
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size, dtype=KvDtype.FLOAT32
    )
    hello = NodeHello(
        node_id=node_id,
        incarnation=f"{node_id}-1",
        role=NodeRole.PREFILL,
        state=state,
        session_address=f"{node_id}:1",
        metrics_address=f"{node_id}:2",
        model_id="m",
        revision="r",
        layout=layout,
        num_blocks=100,
        max_model_len=64,
        introduction_key=node_id.encode(),
    )
    return Member(hello, None, LoadReport(state=state, role=hello.role))  # type: ignore[arg-type]


def stored(num_tokens: int, block_size: int = 4, tier: KvTier = KvTier.POOL) -> KvEvents:
    return KvEvents(tier=tier, stored=hash_chain(PROMPT[:num_tokens], block_size, ""))


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


@given(steps=STEPS, removed=st.sets(st.integers(0, 2)))
def test_it_finds_what_a_naive_search_finds(steps: list[Step], removed: set[int]) -> None:
    members = [make_member(f"n{i}", block_size=(4, 4, 8)[i]) for i in range(3)]
    index = PrefixIndex()
    held: dict[tuple[int, KvTier], set[int]] = {}  # block numbers of the prompt
    for who, tier, new, gone in steps:
        chain = hash_chain(PROMPT, members[who].hello.layout.block_size, "")
        new = frozenset(block for block in new if block < len(chain))
        gone = frozenset(block for block in gone if block < len(chain)) - new
        index.apply(
            members[who],
            KvEvents(tier=tier, stored=[chain[b] for b in new], evicted=[chain[b] for b in gone]),
        )
        held.setdefault((who, tier), set()).update(new)
        held[who, tier].difference_update(gone)
    for who in removed:
        index.remove(members[who])

    def leading(blocks: set[int]) -> int:
        return next(i for i in range(len(PROMPT)) if i not in blocks)

    expected = {}
    for who in {0, 1, 2} - removed:
        size = members[who].hello.layout.block_size
        pool = held.get((who, KvTier.POOL), set())
        both = pool | held.get((who, KvTier.HOST), set())
        if leading(both):
            expected[members[who]] = HeldPrefix(leading(both) * size, leading(pool) * size)
    assert index.longest_prefixes(PROMPT, "") == expected


def test_nothing_is_left_of_a_member_that_is_gone() -> None:
    index, members = PrefixIndex(), [make_member(f"n{i}") for i in range(3)]
    for member in members:
        index.apply(member, stored(40))
        index.apply(member, stored(40, tier=KvTier.HOST))
    for member in members:
        index.remove(member)
    assert not any(index._holders.values())
    assert not index._holdings
    index.apply(members[0], stored(4))
    assert index.longest_prefixes(PROMPT, "") == {members[0]: HeldPrefix(4, 4)}


def test_another_salt_is_another_prefix() -> None:
    index, member = PrefixIndex(), make_member("n")
    index.apply(member, stored(40))
    assert index.longest_prefixes(PROMPT, "salt") == {}


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="3 bytes"):
        PrefixIndex().apply(make_member("n"), KvEvents(tier=KvTier.POOL, stored=[b"abc"]))


def test_hints_name_others_that_hold_more_longest_first() -> None:
    index = PrefixIndex()
    puller = make_member("puller")
    holders = {n: make_member(f"holder-{n}") for n in (4, 12, 16, 24, 36)}
    for num_tokens, member in holders.items():
        index.apply(member, stored(num_tokens))
    index.apply(puller, stored(12))
    held = index.longest_prefixes(PROMPT, "")
    sources = prefix_sources(held, puller, len(PROMPT))
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
    puller, holder = make_member("puller"), make_member("holder")
    index.apply(holder, stored(40))
    index.apply(puller, stored(36))
    assert prefix_sources(index.longest_prefixes(PROMPT, ""), puller, len(PROMPT)) == []


def test_a_node_that_takes_no_legs_is_no_source() -> None:
    index, puller = PrefixIndex(), make_member("puller")
    index.apply(make_member("draining", state=NodeState.DRAINING), stored(40))
    assert prefix_sources(index.longest_prefixes(PROMPT, ""), puller, len(PROMPT)) == []


def test_a_holder_in_the_pool_comes_before_one_in_the_host_tier() -> None:
    index, puller = PrefixIndex(), make_member("puller")
    index.apply(make_member("host"), stored(40, tier=KvTier.HOST))
    index.apply(make_member("pool"), stored(40))
    sources = prefix_sources(index.longest_prefixes(PROMPT, ""), puller, len(PROMPT))
    assert [source.node.node_id for source in sources] == ["pool", "host"]


def test_holders_with_other_blocks_count_in_tokens() -> None:
    index, puller = PrefixIndex(), make_member("puller", block_size=16)
    index.apply(make_member("finer"), stored(28))
    (source,) = prefix_sources(index.longest_prefixes(PROMPT, ""), puller, len(PROMPT))
    assert source.num_tokens == 28
    index.apply(puller, stored(16, block_size=16))
    assert prefix_sources(index.longest_prefixes(PROMPT, ""), puller, len(PROMPT)) == []
