"""What decoders of different families compute differently, but for sizes, norms and positions.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pdserve.engine.models.json_fields import JsonFields


class Activation(StrEnum):
    """What is computed of the gate in an MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"  # x * sigmoid(1.5957691 * (x + 0.044715 x³))
    CLAMPED = "clamped"  # x * sigmoid(1.702 x), times up + 1: of x to 7, and up within 7


# As config.json has them.
ACTIVATIONS: Final = {
    "silu": {Activation.SILU, Activation.CLAMPED},
    "swish": {Activation.SILU},
    "gelu_pytorch_tanh": {Activation.GELU_TANH},
    "gelu_new": {Activation.GELU_TANH},
}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """By default, what every decoder has."""

    activation: Activation = Activation.SILU
    attention_scale: float | None = None  # of dot products; None: head_dim ** -0.5
    attention_cap: float | None = None  # scores become cap * tanh(score / cap); None: they do not
    logit_cap: float | None = None  # likewise
    embedding_scale: float = 1.0  # of embedded tokens, rounded to the type of activations
    logit_scale: float = 1.0
    # Of what sublayers add. The residual stream is kept divided by it instead: embedded tokens are,
    # and norms make the same of it with an epsilon divided by its square (ModelConfig has that).
    residual_scale: float = 1.0
    centres_norms: bool = False  # norms subtract the mean first; else they are RMS norms
    norms_heads_together: bool = False  # norms of heads are of all of a token; else of each head
    is_parallel: bool = False  # the MLP takes what attention takes, not what that leaves


PLAIN: Final = Arithmetic()


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number of the arithmetic, and the field of config.json that it comes from."""

    name: str  # in Arithmetic
    key: str
    default: float | None = None  # where config.json says nothing; null there is none at all
    made: Callable[[float], float] = float  # of what config.json says

    def read(self, config: JsonFields) -> dict[str, float]:
        """Return it by its name; {}: there is none. Raises ModelError: it is no number above 0."""
        is_null = config.has_key(self.key) and self.key not in config
        if is_null or (self.key not in config and self.default is None):
            return {}
        return {self.name: self.made(config.number(self.key, self.default, above=0.0))}
