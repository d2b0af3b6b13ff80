"""The synthetic workloads, by name: their request mixtures, latency targets, and purposes.

Lengths are for a model that takes 8192 tokens and prefills about 2,000 per second and core; for a
model that takes fewer, all lengths are scaled down alike. Targets are multiples of the latencies of
an idle cluster, so that they mean the same on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from pdserve.shared.errors import ConfigError

ScenarioName = Literal["long-prompts", "short-prompts", "conversation", "chats", "agents"]

MODEL_LEN: Final = 8192  # tokens; the lengths below are for such a model


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths in tokens, cut at both ends."""

    median: float
    sigma: float  # of the logarithm; 0: always the median
    least: int
    most: int

    def scaled(self, factor: float) -> Lengths:
        """Return these lengths times `factor`, at least one token each."""
        least, most = (max(1, int(bound * factor)) for bound in (self.least, self.most))
        return Lengths(self.median * factor, self.sigma, least, most)


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One kind of request in a mixture."""

    name: str
    cards: int  # number of cards in the deck that requests are dealt from
    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class Scenario:
    """A mixture of requests, and their latency targets."""

    name: str
    shows: str  # its purpose, in one line
    kinds: tuple[RequestKind, ...]
    ttft_scale: float  # TTFT target, in multiples of the slowest on an idle cluster
    tpot_scale: float  # TPOT target, in multiples of the median on an idle cluster
    disturbed_by: str = ""  # the kind whose effect on the others' ITL is measured separately
    share: float = 1.0  # share of the time that is available for several scenarios

    @property
    def deck(self) -> int:
        """Number of requests after which the mixture is exact."""
        return sum(kind.cards for kind in self.kinds)

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest possible request."""
        return max(kind.prompt.most + kind.output.most for kind in self.kinds)

    def fitted(self, max_model_len: int, length_scale: float) -> Scenario:
        """Scale to a model's maximum length, and by `length_scale` on top of that.

        Raises:
            ConfigError: the longest request is too long for the model.
        """
        factor = min(1.0, max_model_len / MODEL_LEN) * length_scale
        kinds = tuple(
            replace(kind, prompt=kind.prompt.scaled(factor), output=kind.output.scaled(factor))
            for kind in self.kinds
        )
        fitted = replace(self, kinds=kinds)
        if fitted.most_tokens > max_model_len:
            raise ConfigError(
                f"length_scale {length_scale:g}: requests of {fitted.most_tokens} tokens do not "
                f"fit a model of {max_model_len}"
            )
        return fitted


def draw(lengths: Lengths, rng: np.random.Generator) -> int:
    """Draw one length, in tokens."""
    drawn = float(lengths.median * np.exp(lengths.sigma * rng.standard_normal()))
    return min(max(round(drawn), lengths.least), lengths.most)


def _always(tokens: int) -> Lengths:
    return Lengths(tokens, 0.0, tokens, tokens)


# One prompt of 4k per twelve chats: about as much work for a prefill node as their answers are for
# a decode node at this TPOT, so that one node of each role is balanced.
LONG_PROMPTS = Scenario(
    name="long-prompts",
    shows="4k-token prompts among chat streams, tight TPOT",
    kinds=(
        RequestKind("chat", 12, Lengths(96, 0.4, 32, 256), Lengths(256, 0.3, 128, 512)),
        RequestKind("long", 1, _always(4096), _always(64)),
    ),
    ttft_scale=3.0,
    tpot_scale=2.0,
    disturbed_by="long",
    share=3.0,
)

# Hardly any prefill: a core reserved for it is wasted.
SHORT_PROMPTS = Scenario(
    name="short-prompts",
    shows="short prompts, longer answers, loose TPOT",
    kinds=(RequestKind("chat", 1, Lengths(48, 0.4, 16, 128), Lengths(96, 0.3, 48, 192)),),
    ttft_scale=20.0,
    tpot_scale=8.0,
)

# Fitted to the Azure 2023 conversation trace: the logarithms of its lengths have means of 6.633
# (760 tokens) and 5.019 (151), standard deviations of 0.985 and 0.859, and nearly no correlation
# (0.09). Lengths are a quarter of that, cut at its 99th percentiles (4142 and 601).
CONVERSATION = Scenario(
    name="conversation",
    shows="lengths as in the Azure 2023 conversation trace, a quarter of them",
    kinds=(RequestKind("turn", 1, Lengths(190, 0.985, 1, 1036), Lengths(38, 0.859, 1, 150)),),
    ttft_scale=5.0,
    tpot_scale=3.0,
)

SCENARIOS: Final[dict[str, Scenario]] = {
    "long-prompts": LONG_PROMPTS,
    "short-prompts": SHORT_PROMPTS,
    "conversation": CONVERSATION,
}
