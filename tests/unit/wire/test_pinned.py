"""What builds before this one have, too: the bytes of legs, and the hashes of their prompts."""

from __future__ import annotations

import pytest

from pdserve.protocol import (
    DecodeLeg,
    Message,
    NodeAddress,
    Prefetch,
    PrefillLeg,
    PrefixSource,
    Prompt,
    SamplingParams,
    Sibling,
    Slo,
)
from pdserve.wire.envelopes import FROM_COORDINATOR

PROMPT = Prompt([1, 2, 300], "salt")
SAMPLING = SamplingParams(seed=5, max_tokens=7)
SLO = Slo(name="chat", tenant="a")
NODE = NodeAddress(node_id="p1", incarnation="i", session_address="127.0.0.1:7", introduction=b"x")
SOURCES = [PrefixSource(node=NODE, num_tokens=4)]
LEGS = {
    "0a71126f0a017212040102ac021a1f09000000000000f03f19000000000000f03f39000000000000f03f480550"
    "07220473616c742801321b0a170a0270311201691a0b3132372e302e302e313a3722017810043a120a0463686174"
    "19000000000000f03f3a016142070a03722d3110064a0174": PrefillLeg(
        "r",
        PROMPT,
        SAMPLING,
        prefix_sources=SOURCES,
        slo=SLO,
        siblings=[Sibling(request_id="r-1", seed=6)],
        traceparent="t",
    ),
    "0a3612340a01721201011a1f09000000000000f03f19000000000000f03f39000000000000f03f480550072801"
    "3a0919000000000000f03f": PrefillLeg("r", Prompt([1]), SAMPLING),
    "0a8a011a87010a017212040102ac021a1f09000000000000f03f19000000000000f03f39000000000000f03f48"
    "055007220473616c742a170a0270311201691a0b3132372e302e302e313a37220178321b0a170a0270311201691a"
    "0b3132372e302e302e313a3722017810043a120a046368617419000000000000f03f3a01614201714a0109500160"
    "0172016f": DecodeLeg(
        "r",
        PROMPT,
        SAMPLING,
        source=NODE,
        prefix_sources=SOURCES,
        slo=SLO,
        sibling_of="q",
        output_token_ids=[9],
        is_claimable=True,
        flows=True,
        takes_over="o",
    ),
    "0a2e3a2c0a017212040102ac021a0473616c74221b0a170a0270311201691a0b3132372e302e302e313a37220178"
    "1004": Prefetch("r", PROMPT, prefix_sources=SOURCES),
}


@pytest.mark.parametrize("said", LEGS)
def test_legs_have_the_bytes_that_they_had(said: str) -> None:
    leg: Message = LEGS[said]
    assert FROM_COORDINATOR.wrap(leg).SerializeToString().hex() == said


@pytest.mark.parametrize(
    ("salt", "is_long", "hashes"),
    [
        ("", False, ["31c4eaebac57eec70db6e59e07415afd", "5966929883cbaa43cc2303901595ba83"]),
        ("é", False, ["b17c8b73ab2ae3efe21106ec680cebef", "32f6ada753a58cb505e745144b6b937f"]),
        ("é", True, ["063b84efdc4c59dd88ba25b820c0f734", "969679b917270436299080dec99258b7"]),
    ],
)
def test_blocks_have_the_hashes_that_they_had(salt: str, is_long: bool, hashes: list[str]) -> None:
    prompt = Prompt([1, 2, 3, 4, 5], salt, is_long)
    assert [digest.hex() for digest in prompt.hashes(2)] == hashes
    beginning = Prompt([1, 2], salt, is_long)
    assert beginning.then([3, 4, 5]) == prompt
    grown = beginning.hashes(2)
    beginning.extend_hashes(grown, lambda start, end: prompt.token_ids[start:end], 5, 2)
    assert grown == prompt.hashes(2)
