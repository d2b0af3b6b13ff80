"""What goes wrong in a life."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal[
    "crash",  # kill -9: the kernel closes its connections
    "host lost",  # nobody says anything
    "freeze",
    "pause coordinator",
    "cut",
    "one-way cut",
    "refuse",
    "slow link",
    "slow node",
    "drain",
    "flip",
    "bad steps",
    "stuck step",
    "dead thread",
    "failing pulls",
    "corrupt pulls",
]
KINDS: dict[Kind, int] = {
    "crash": 6,
    "host lost": 2,
    "freeze": 4,
    "pause coordinator": 2,
    "cut": 3,
    "one-way cut": 2,
    "refuse": 2,
    "slow link": 2,
    "slow node": 2,
    "drain": 5,
    "flip": 4,
    "bad steps": 3,
    "stuck step": 1,
    "dead thread": 1,
    "failing pulls": 2,
    "corrupt pulls": 2,
}
# What takes requests from a node.
DEADLY: frozenset[Kind] = frozenset(
    {"crash", "host lost", "freeze", "cut", "one-way cut", "refuse", "bad steps"}
    | {"stuck step", "dead thread", "pause coordinator"}
)


# Those that no request can be guilty of: the node only falls silent.
SILENT: frozenset[Kind] = frozenset({"host lost", "freeze", "cut", "pause coordinator"})


@dataclass(frozen=True)
class Fault:
    """One of them; some last for a while."""

    at_s: float
    kind: Kind
    node: int
    other: int  # the other end of a cut; the node itself stands for the coordinator
    for_s: float
    amount: int


def random_faults(
    random: Random, num_faults: int, num_nodes: int, first_s: float, has_checksums: bool
) -> list[Fault]:
    """Draw some, of which two may come at once."""
    kinds = dict(KINDS)
    if not has_checksums:  # without them nothing would tell
        del kinds["corrupt pulls"]
    faults: list[Fault] = []
    at_s = first_s
    for _ in range(num_faults):
        if random.random() < 0.7:
            at_s = first_s + random.uniform(0.05, 2.0)
        faults.append(
            Fault(
                at_s,
                random.choices(list(kinds), list(kinds.values()))[0],
                random.randrange(num_nodes),
                random.randrange(num_nodes),
                random.choice([0.05, 0.3, 1.0, 3.0, 7.0]),
                random.choice([1, 1, 2, 3]),
            )
        )
    return sorted(faults, key=lambda fault: fault.at_s)
