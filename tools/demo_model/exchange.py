"""A question with its answer, and the rule that holds some of them out of training.

Every skill is a function from a random generator to an `Exchange`. An exchange's key alone decides
whether it is held out, never the run, so no training run, whatever its seed, has seen the questions
of the evaluation.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

HELD_OUT_ONE_IN: Final = 16


@dataclass(frozen=True)
class Exchange:
    """A user's question and the assistant's answer."""

    skill: str
    question: str
    answer: str
    brief: str = ""
    """The answer when the system message asks for a short one; empty means the full answer."""
    key: str = ""
    """The split's hash key: the numbers of a sum, the wording of a fact; empty: never held out."""


Skill = Callable[[random.Random], Exchange]
PairSkill = Callable[[random.Random], tuple[Exchange, Exchange]]
"""The second exchange cannot be answered without the first."""


def is_key_held_out(skill: str, key: str) -> bool:
    """Return whether exchanges with this key belong to the evaluation only."""
    return zlib.crc32(f"{skill}|{key}".encode()) % HELD_OUT_ONE_IN == 0


def is_held_out(exchange: Exchange) -> bool:
    """Return whether the exchange belongs to the evaluation only."""
    return bool(exchange.key) and is_key_held_out(exchange.skill, exchange.key)


def draw(skill: Skill, rng: random.Random, *, held_out: bool = False) -> Exchange:
    """Sample the skill until an exchange is on the wanted side of the split."""
    while True:
        exchange = skill(rng)
        if is_held_out(exchange) == held_out:
            return exchange


def draw_pair(
    skill: PairSkill, rng: random.Random, *, held_out: bool = False
) -> tuple[Exchange, Exchange]:
    """Sample pairs until the second exchange is on the wanted side of the split."""
    while True:
        first, second = skill(rng)
        if is_held_out(second) == held_out:
            return first, second
