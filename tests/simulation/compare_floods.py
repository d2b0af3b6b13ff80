"""Compares a payer's TTFT with and without a flood of calls from another payer, by simulation.

    python -m tests.simulation.compare_floods --of class --mode colocated --seeds 1 12

Alice and Bob pay alike and send two calls a second each, for half a minute; in the flood Bob sends
ten times as many. Printed are Alice's percentiles of TTFT in the flood over those without it, in
the first seconds and after them, and how many of her calls kept their promise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import get_args

from pdserve.commands.simulation.call import Call
from pdserve.protocol import Slo
from pdserve.settings.config import Mode, PolicyConfig
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import calls, lognormal, merged, poisson

RATE = 2.0  # calls per second
FLOOD = 10.0  # times Bob's rate
LASTS_S = 30.0
HAS_BEGUN_S = 5.0  # until then no payer has a history
POLICY = PolicyConfig(prefill_policy="edf-slack", decode_policy="tpot-cap")
NODES: dict[Mode, tuple[int, int]] = {
    "disaggregated": (1, 1),
    "colocated": (0, 2),
    "adaptive": (1, 1),
}
PAYERS: dict[str, tuple[Slo, Slo]] = {
    "class": (
        Slo(name="alice", ttft_s=2.0, tpot_s=0.1),
        Slo(name="bob", ttft_s=2.0, tpot_s=0.1),
    ),
    "tenant": (
        Slo(name="standard", tenant="alice", ttft_s=2.0, tpot_s=0.1),
        Slo(name="standard", tenant="bob", ttft_s=2.0, tpot_s=0.1),
    ),
}


def main() -> None:
    """Print one line for the first seconds, and one for what follows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=PAYERS, default="class", help="who floods")
    parser.add_argument("--mode", choices=get_args(Mode), default="colocated")
    parser.add_argument("--seeds", type=int, nargs=2, default=(1, 12), help="first and last")
    options = parser.parse_args()
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    calm = replay(PAYERS[options.of], options.mode, 1.0, seeds).where(is_alices)
    flooded = replay(PAYERS[options.of], options.mode, FLOOD, seeds).where(is_alices)
    for name, when in (("first 5 s", is_first), ("then", is_later)):
        before, after = calm.where(when), flooded.where(when)
        ratios = [f"p{p} {after.ttft_s(p) / before.ttft_s(p):.2f}" for p in (50, 90, 99)]
        print(f"{name:9} TTFT {' '.join(ratios)}, on time {after.attainment:.1%}")  # noqa: T201


def replay(
    payers: tuple[Slo, Slo],
    mode: Mode,
    flood: float,
    seeds: Iterable[int],
    until_s: float = LASTS_S,
) -> Score:
    """Return the score of several seeds together; Bob sends `flood` times as many calls."""
    alice, bob = payers
    prompt, answer = lognormal(600, 0.7, 3000), lognormal(20, 0.5, 60)
    outcomes = []
    for seed in seeds:
        load = merged(
            calls("alice", poisson(RATE, until_s, seed), prompt, answer, alice),
            calls("bob", poisson(RATE * flood, until_s, seed + 100), prompt, answer, bob),
        )
        outcomes += fleet(*NODES[mode], mode, load, POLICY, admission=True).score.outcomes
    return Score(outcomes)


def is_alices(call: Call) -> bool:
    """Whether Alice sent this call."""
    return call.call_id.startswith("alice")


def is_first(call: Call) -> bool:
    """Whether the call was sent before anybody had a history."""
    return call.at_s <= HAS_BEGUN_S


def is_later(call: Call) -> bool:
    """Whether the call was sent after that."""
    return not is_first(call)


if __name__ == "__main__":
    main()
