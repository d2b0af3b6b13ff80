"""Which requests are long is decided once, and all that is sent for one says so."""

from __future__ import annotations

import pytest

from coordinator.generation import GenerationRequest
from pdserve.protocol import (
    DecodeLeg,
    NodeRole,
    NodeState,
    Prefetch,
    Prefetched,
    PrefillLeg,
    Prompt,
    SamplingParams,
)
from tests.fakes.members import join, report
from tests.unit.coordinator.requests.test_flow import Nodes, sent, token
from tests.unit.coordinator.requests.test_resumes import further, settle

PREFILL, DECODE = NodeRole.PREFILL, NodeRole.DECODE
SHORT_LEN = 6  # the prompt has three tokens


@pytest.mark.parametrize(("max_tokens", "is_long"), [(3, False), (4, True)])
async def test_all_that_is_sent_of_a_request_says_whether_it_is_long(
    max_tokens: int, is_long: bool
) -> None:
    """Two legs, another answer, a move, and another attempt where it was lost."""
    nodes, said = Nodes(), []

    async def note(message_type: type, *members: object) -> None:
        await settle()
        messages = [m for member in members for m in sent(member)]  # type: ignore[arg-type]
        found = [m for m in messages if isinstance(m, message_type)]
        assert found
        said.extend(message.prompt.is_long for message in found)

    prefill = join(nodes.registry, "p", PREFILL, short_len=SHORT_LEN)
    decode = join(nodes.registry, "d", DECODE, short_len=SHORT_LEN)
    sampling = SamplingParams(max_tokens=max_tokens)
    running, other = nodes.flow.start_siblings(
        [
            GenerationRequest(request_id=name, prompt=Prompt([1, 2, 3]), sampling=sampling)
            for name in ("r", "s")
        ]
    )
    await note(PrefillLeg, prefill)
    await note(DecodeLeg, decode)
    nodes.say(prefill, token(0), token(0, request_id="s"))
    other.cancel("done")
    nodes.say(decode, token(1))
    target = join(nodes.registry, "e", DECODE, short_len=SHORT_LEN)
    running.shuns_takeovers = True
    report(nodes.registry, decode, DECODE, state=NodeState.DRAINING)
    await note(Prefetch, target)
    nodes.flow.prefetched(Prefetched(request_id="r~1", num_tokens=0), target)
    nodes.registry.remove(decode)
    await note(DecodeLeg, target)
    further(nodes, target, "r~1", 2, max_tokens)
    assert said == [is_long] * len(said)
    assert len(said) == 5
    assert running.request.prompt.is_long == is_long


async def test_without_another_rope_none_is_long() -> None:
    nodes = Nodes()
    nodes.join("p", PREFILL)
    nodes.join("d", DECODE)
    running = nodes.start(max_tokens=60)
    assert not running.request.prompt.is_long
    running.cancel("done")
