"""A simulated host: what its nodes wait for beside each other."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.commands.simulation.host import Host
from pdserve.measured.calibration import Sharing
from pdserve.measured.perf_model import StepShape

PROMPT, DECODE = StepShape(100, 1, 5050, 0), StepShape(2, 2, 0, 200)
BUS = Sharing(
    decode_beside_decode=1.6,
    decode_beside_prompt=1.3,
    prompt_beside_decode=1.2,
    prompt_beside_prompt=1.1,
)
FRONT = Sharing(cores=2, front_request_s=0.003, front_step_s=0.001, front_token_s=0.0005)


def host(sharing: Sharing, *nodes: str) -> Host:
    """A host with one thread a node."""
    made = Host("host", sharing)
    for node in nodes:
        made.join(node)
    return made


@pytest.mark.parametrize(
    ("own", "other", "factor"),
    [(DECODE, DECODE, 1.6), (DECODE, PROMPT, 1.3), (PROMPT, DECODE, 1.2), (PROMPT, PROMPT, 1.1)],
)
def test_kinds_of_steps_cost_each_other_what_was_measured(
    own: StepShape, other: StepShape, factor: float
) -> None:
    shared = host(BUS, "a", "b")
    assert shared.begin("a", other, 0, 0.01) == 1.0
    assert shared.begin("b", own, 0, 0.01) == factor
    shared.end("a")
    shared.end("b")
    assert shared.begin("b", own, 0, 0.01) == 1.0


def test_what_is_in_front_takes_time_only_where_no_core_is_idle() -> None:
    shared = host(FRONT, "p", "d")
    assert shared.begin("d", DECODE, 0, 0.01) == 1.0
    # A tenth of a core for a step with two tokens, twice; and 3 + 1.5 of 100 ms for a prompt.
    assert shared.begin("p", PROMPT, 1, 0.1) == pytest.approx((2 + 0.2 + 0.045) / 2)
    shared.end("d")
    shared.end("p")
    assert shared.begin("p", StepShape(100, 0, 5050, 0), 0, 0.1) == 1.0  # a chunk tells nothing
    assert shared.begin("d", DECODE, 0, 0.01) == pytest.approx((2 + 0.2) / 2)


def test_a_node_of_a_pair_leaves_no_core_of_the_pair_idle() -> None:
    made = Host("host", FRONT)
    for node in ("p", "d"):
        made.join(node, "pair")
    assert made.begin("d", DECODE, 0, 0.01) == pytest.approx((2 + 0.2) / 2)
    assert made.begin("p", PROMPT, 1, 0.1) == pytest.approx((2 + 0.2 + 0.045) / 2)
    made.end("d")
    made.end("p")
    wide = Host("host", msgspec.structs.replace(FRONT, cores=4))
    for node, pair in (("p0", "a"), ("p1", "b"), ("d0", "a"), ("d1", "b")):
        wide.join(node, pair)
    assert wide.begin("d0", DECODE, 0, 0.01) == 1.0  # the other pair's cores are idle
    assert wide.begin("p1", PROMPT, 1, 0.1) == pytest.approx((4 + 0.2 + 0.045) / 4)


def test_more_nodes_than_cores_share_those_that_they_are_started_on() -> None:
    """As `pdserve up` places them: the first and the third are on one core."""
    shared = host(Sharing(cores=2), "prefill-0", "prefill-1", "decode-0")
    assert shared.begin("prefill-0", PROMPT, 0, 0.1) == 1.0
    assert shared.begin("prefill-1", PROMPT, 0, 0.1) == 1.0
    assert shared.begin("decode-0", DECODE, 0, 0.01) == 2.0
    shared.end("prefill-0")
    shared.end("decode-0")
    assert shared.begin("decode-0", DECODE, 0, 0.01) == 1.0
