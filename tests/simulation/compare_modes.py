"""Compares adaptive mode with the two modes that it chooses between, and with published rules.

    python -m tests.simulation.compare_modes --seeds 0 7 --slower 1.2 --apart

Two nodes of a core each serve mixtures of requests: as prefill and decode node, as two co-located
nodes, and in adaptive mode, by our own rule and by others. Printed are the attainment of the kind
of request that is worst off, in percent, and that of our rule as a share of the better mode's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.host import Sharing
from pdserve.commands.simulation.machine import Machine, scaled
from pdserve.commands.simulation.outcome import Outcome
from pdserve.protocol import Slo
from pdserve.settings.config import Mode, PolicyConfig, RouterName
from tests.simulation.machines import ONE_CORE_53M
from tests.simulation.scenarios import fleet
from tests.simulation.score import Score
from tests.simulation.workload import Length, calls, fixed, lognormal, merged, poisson

LASTS_S = 60.0
AS_GOOD = 0.95  # of the better of the other two
HOLD = 0.9  # share of the TTFT for which token 1 may be held back, as the benchmark sets it
NODES: dict[Mode, tuple[int, int]] = {
    "disaggregated": (1, 1),
    "colocated": (0, 2),
    "adaptive": (1, 1),
    "flowing": (1, 1),
}
COMPARED: tuple[Mode, ...] = ("disaggregated", "colocated", "adaptive")
BASELINES: tuple[RouterName, ...] = ("deflection", "conserve", "ppd", "prfaas")
BUS = Sharing(
    decode_beside_decode=1.6,
    decode_beside_prompt=1.2,
    prompt_beside_decode=1.1,
    prompt_beside_prompt=1.1,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request in a mixture."""

    share: float  # of the requests
    prompt: Length
    answer: Length


@dataclass(frozen=True, slots=True)
class Mixture:
    """Kinds of requests by name, what they are promised, and the rates to simulate."""

    kinds: dict[str, Kind]
    ttft_s: float
    tpot_s: float
    per_s: tuple[float, ...]

    def load(self, per_s: float, seed: int) -> list[Call]:
        slo = Slo(ttft_s=self.ttft_s, tpot_s=self.tpot_s, hold_s=HOLD * self.ttft_s)
        streams = [
            calls(
                f"{name}-{seed}",
                poisson(kind.share * per_s, LASTS_S, seed=1000 * seed + number),
                kind.prompt,
                kind.answer,
                slo,
                most_output=1,
            )
            for number, (name, kind) in enumerate(self.kinds.items())
        ]
        return merged(*streams)


CHAT = lognormal(96, 0.4, 256), lognormal(256, 0.3, 512)
LONG = fixed(4096), fixed(64)
MIXTURES = {
    "short prompts": Mixture(
        {"chat": Kind(1.0, lognormal(48, 0.4, 128), lognormal(96, 0.3, 192))},
        ttft_s=0.67,
        tpot_s=0.04,
        per_s=(10.0, 17.0, 24.0),
    ),
    "chats, loose": Mixture({"chat": Kind(1.0, *CHAT)}, 0.7, 0.03, (5.5, 9.0)),
    "chats, tight": Mixture({"chat": Kind(1.0, *CHAT)}, 0.7, 0.0105, (4.0,)),
    "12 chats to 1 long": Mixture(
        {"chat": Kind(12 / 13, *CHAT), "long": Kind(1 / 13, *LONG)}, 9.6, 0.0105, (1.6, 2.4)
    ),
    "8 chats to 1 long": Mixture(
        {"chat": Kind(8 / 9, *CHAT), "long": Kind(1 / 9, *LONG)}, 9.6, 0.008, (1.1, 1.6)
    ),
    "3 chats to 1 of 2k": Mixture(
        {"chat": Kind(0.75, *CHAT), "long": Kind(0.25, fixed(2048), fixed(128))},
        ttft_s=6.0,
        tpot_s=0.0105,
        per_s=(1.5, 2.2),
    ),
    "long prompts": Mixture({"long": Kind(1.0, *LONG)}, 9.6, 0.0105, (0.26, 0.4)),
}


def main() -> None:
    """Print a line for each mixture and rate, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 2), help="first and last")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on all times of a node")
    parser.add_argument("--apart", action="store_true", help="each node has its own memory bus")
    options = parser.parse_args()
    machine = replace(ONE_CORE_53M, costs=scaled(ONE_CORE_53M.costs, options.slower))
    seeds = range(options.seeds[0], options.seeds[1] + 1)
    shares = []
    contestants: list[tuple[Mode, RouterName]] = [(mode, "predicted") for mode in COMPARED]
    contestants += [("adaptive", router) for router in BASELINES]
    names = [*COMPARED, *BASELINES]
    print(" " * 26, *(name[:6].rjust(6) for name in names))  # noqa: T201
    for name, mixture in MIXTURES.items():
        for per_s in mixture.per_s:
            loads = [mixture.load(per_s, seed) for seed in seeds]
            sharing = None if options.apart else BUS
            found = [worst(loads, *chosen, machine, sharing) for chosen in contestants]
            apart, together, adaptive, *_ = found
            shares.append(adaptive / max(apart, together))
            figures = " ".join(f"{attained:6.1%}" for attained in found)
            print(f"{name:20} {per_s:5}/s {figures}  {shares[-1]:.2f}", flush=True)  # noqa: T201
    num_good = sum(share >= AS_GOOD for share in shares)
    print(f"{num_good} of {len(shares)} at {AS_GOOD}, mean {fmean(shares):.2f}")  # noqa: T201


def worst(
    loads: Iterable[list[Call]],
    mode: Mode,
    router: RouterName,
    machine: Machine,
    sharing: Sharing | None,
) -> float:
    """Return the attainment of the kind of request that is worst off, over all loads together."""
    of_kind: dict[str, list[Outcome]] = {}
    for load in loads:
        nodes, policy = NODES[mode], PolicyConfig()
        run = fleet(*nodes, mode, load, policy, machine, router=router, sharing=sharing)
        for outcome in run.score.outcomes:
            of_kind.setdefault(outcome.call.call_id.partition("-")[0], []).append(outcome)
    return min(Score(outcomes).attainment for outcomes in of_kind.values())


if __name__ == "__main__":
    main()
