"""Revisions of a model side by side: who joins, and which conversations go where."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

import pytest
from msgspec.structs import replace

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Registry
from coordinator.nodes.revisions import Revisions
from pdserve.kv import KvDtype
from pdserve.protocol import NodeRole, Prompt, SamplingParams
from pdserve.shared.errors import ConfigError, InvalidRequest
from tests.fakes.hellos import LAYOUT, node_hello
from tests.fakes.members import join


def request(conversation: int | None = None, name: str = "r") -> GenerationRequest:
    return GenerationRequest(
        request_id=name, prompt=Prompt([1]), sampling=SamplingParams(), conversation=conversation
    )


def side_by_side(**shares: float) -> Revisions:
    registry = Registry()
    for revision in ("old-1", "new-1"):
        join(registry, f"node of {revision}", NodeRole.DECODE, revision=revision)
    return Revisions(registry, lambda revision, adapter: True, shares)


def test_another_revision_joins_only_with_a_share() -> None:
    registry = Registry()
    join(registry, "d0", NodeRole.DECODE, revision="old-1")
    revisions = Revisions(registry, lambda revision, adapter: True, {})
    newcomer = node_hello("d1", revision="new-1")
    with pytest.raises(ConfigError, match=r"'new-1'.*'old-1'.*pdserve revisions"):
        revisions.check(newcomer)
    revisions.set({"old": 1.0, "new": 0.0})
    revisions.check(newcomer)
    with pytest.raises(ConfigError, match="'other'"):
        revisions.check(node_hello("d2", revision="other"))


def test_nodes_with_weights_by_role_join_where_prompts_have_nodes_of_their_own() -> None:
    registry = Registry()
    join(registry, "p0", NodeRole.PREFILL, arithmetic="int8+a")
    decode = node_hello("d0", arithmetic="int4+b")
    revisions = Revisions(registry, lambda revision, adapter: True, {})
    revisions.check(decode)
    another = node_hello("p1", NodeRole.PREFILL, arithmetic="int8+c")
    with pytest.raises(ConfigError, match=r"int8\+c.*int8\+a.*both are prefill.*engine.kernels"):
        revisions.check(another)
    adaptive = Revisions(registry, lambda revision, adapter: True, {}, "adaptive")
    with pytest.raises(ConfigError, match=r"by role.*adaptive.*disaggregated"):
        adaptive.check(decode)
    with pytest.raises(ConfigError, match=r"one has weights by role.*prefill_quantization"):
        revisions.check(node_hello("d1", revision="other"))


def test_nodes_with_weights_by_role_stay_in_their_pool() -> None:
    assert "weights of decode nodes" in node_hello("d", arithmetic="int4").refusal(NodeRole.PREFILL)
    prefill = node_hello("p", NodeRole.PREFILL, arithmetic="int8")
    assert "weights of prefill nodes" in prefill.refusal(NodeRole.DECODE)
    assert prefill.refusal(NodeRole.PREFILL) == ""
    assert node_hello("d").refusal(NodeRole.PREFILL) == ""
    private = node_hello("d", prefill_refusal="its memory is private")
    assert private.refusal(NodeRole.PREFILL) == "its memory is private"


def test_equal_revisions_have_equal_kv() -> None:
    revisions = side_by_side(old=1, new=1)
    halves = replace(LAYOUT, dtype=KvDtype.BFLOAT16)
    with pytest.raises(ConfigError, match="--dtype"):
        revisions.check(node_hello("d9", revision="new-1", layout=halves))


def test_nodes_that_pass_states_on_have_blocks_of_one_size() -> None:
    """Else each handoff would fail, once its prompt was computed."""
    registry = Registry()
    states = replace(LAYOUT, state_bytes=1000)
    join(registry, "d0", NodeRole.DECODE, layout=states)
    join(registry, "d0 without", NodeRole.DECODE, revision="without", layout=LAYOUT)
    shares = dict.fromkeys(("without", node_hello("any").revision), 1.0)
    revisions = Revisions(registry, lambda revision, adapter: True, shares)
    larger = 2 * LAYOUT.block_size
    revisions.check(node_hello("d1", revision="without", layout=replace(LAYOUT, block_size=larger)))
    with pytest.raises(ConfigError, match=rf"{larger} tokens.*engine\.block_size"):
        revisions.check(node_hello("d1", layout=replace(states, block_size=larger)))


def test_conversations_are_shared_out() -> None:
    revisions = side_by_side(old=3, new=1)
    chosen = Counter(revisions.choose(request(crc32(b"%d" % i))) for i in range(4000))
    assert chosen.keys() == {"old-1", "new-1"}
    assert 0.23 < chosen["new-1"] / 4000 < 0.27
    alone = Counter(revisions.choose(request(name=f"cmpl-{i}")) for i in range(4000))
    assert 0.23 < alone["new-1"] / 4000 < 0.27


def test_a_growing_share_only_takes() -> None:
    """A conversation that has gone over to a revision does not come back while its share grows."""
    revisions = side_by_side(old=9, new=1)
    former: set[int] = set()
    for new in range(1, 11):
        revisions.set({"old": 10 - new, "new": new})
        now = {i for i in range(500) if revisions.choose(request(crc32(b"%d" % i))) == "new-1"}
        assert former <= now
        former = now
    assert len(former) == 500


def test_what_cannot_serve_has_no_share() -> None:
    registry = Registry()
    for revision in ("old-1", "new-1"):
        join(registry, f"node of {revision}", NodeRole.DECODE, revision=revision)
    serving = {("old-1", "")}
    revisions = Revisions(registry, lambda *needs: needs in serving, {"old": 0, "new": 1})
    assert revisions.choose(request()) == ""  # whoever can
    serving.add(("new-1", ""))
    assert revisions.choose(request()) == "new-1"


def test_a_revision_with_nodes_keeps_a_share() -> None:
    revisions = side_by_side(old=1, new=0)
    with pytest.raises(InvalidRequest, match="'new-1' are attached"):
        revisions.set({"old": 1})
    assert revisions.shares == {"old": 1, "new": 0}
