"""What tokens cost, from the prices of nodes and what the nodes did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

import msgspec

DESCRIPTION: Final = (
    "price of a node-hour, in any currency: prefill=2.5 and decode=1.2; 1 where none is given"
)


class Prices(msgspec.Struct, frozen=True):
    """What an hour of a node costs, in any currency."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, texts: Sequence[str]) -> Prices:
        """Return the prices that are written as POOL=AMOUNT; 1 where none is.

        Raises:
            ValueError: a text is not of this form, or no price; says which.
        """
        found = {"prefill": 1.0, "decode": 1.0}
        for text in texts:
            pool, price = price_in(text)
            if pool not in found or not price:
                raise ValueError(
                    f"{text!r} is no price: write prefill=AMOUNT or decode=AMOUNT, with an amount "
                    "above 0"
                )
            found[pool] = price
        return cls(**found)


def price_in(text: str) -> tuple[str, float]:
    """Return what NAME=AMOUNT names, and the amount; 0: it is none that a price can be."""
    name, _, amount = text.partition("=")
    try:
        price = float(amount)
    except ValueError:
        return name.strip(), 0.0
    return name.strip(), price if 0 < price < inf else 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes were paid for, and what came of it. Costs are in the currency of the prices."""

    seconds: float
    paid: float  # for all nodes, idle or not
    busy: float  # for the time in which they computed steps
    prompts: float  # of this, for prompts
    uncached_tokens: int
    cached_tokens: int
    output_tokens: int

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Work(**{name: mine[name] + theirs[name] for name in mine})


class TokenCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs in the currency of the prices. Idle time is apart: no token has caused it.

    Time of prompts is shared by their uncached tokens. A cached token takes no time in a step, as
    far as anybody can tell it apart from the rest, so it costs what memory it takes: here nothing.
    """

    per_hour: float  # of the nodes
    idle_share: float  # of the cost per hour
    per_million_uncached: float | None  # input tokens; None: there are none
    per_million_cached: float | None
    per_million_output: float | None

    @classmethod
    def of(cls, work: Work) -> TokenCosts:
        """Return the costs of the tokens of this work, which took some time."""
        return cls(
            per_hour=work.paid * 3600 / work.seconds,
            idle_share=1 - work.busy / work.paid if work.paid else 0.0,
            per_million_uncached=_per_million(work.prompts, work.uncached_tokens),
            per_million_cached=0.0 if work.cached_tokens else None,
            per_million_output=_per_million(work.busy - work.prompts, work.output_tokens),
        )

    @property
    def per_million(self) -> Mapping[str, float]:
        """The costs of a million tokens of each kind that there were."""
        kinds = {
            "uncached_input": self.per_million_uncached,
            "cached_input": self.per_million_cached,
            "output": self.per_million_output,
        }
        return {kind: cost for kind, cost in kinds.items() if cost is not None}


def _per_million(cost: float, num_tokens: int) -> float | None:
    return 1e6 * cost / num_tokens if num_tokens else None
