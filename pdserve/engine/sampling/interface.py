"""How a step's tokens are chosen: in two halves, before the model computes and after it.

On a CPU the first half does nothing (`sampler.py`). On a GPU it lays out what sampling needs of the
host, so that it travels with the step's batch (`cuda/sampling/sampler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.steps.batch import Cargo


@dataclass(frozen=True, slots=True)
class Draws:
    """What is to be sampled in a step."""

    requests: Sequence[Request]  # [num_draws]; the new token is the next one after their tokens
    rows: list[int] | None  # [num_draws] the row of logits of each; None: of each its own, in order
    masks: TokenMasks | None  # tokens that grammars allow, for the draws that have one
    eos_token_ids: frozenset[int]  # of the model, for `min_tokens`


class StepSampling(Protocol):
    """The sampling of one step."""

    @property
    def cargo(self) -> Cargo | None:
        """What has to be where the logits will be; None: nothing."""

    @property
    def sampled(self) -> Tensor | None:
        """[num_draws] int32 on the device, once launched: the tokens; None if they are not there.

        Negative where none can be chosen.
        """

    def launch(self, logits: Tensor) -> None:
        """Choose the tokens, or have the device choose them, as soon as it has the logits.

        Args:
            logits: [num_rows, vocab_size] float32, as computed by the model; not modified.
        """

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens: one per draw, in order.

        Raises:
            UnusableLogits, NoTokenLeft: for some requests no token can be chosen. No request gets a
                token then.
        """


class Sampler(Protocol):
    """Chooses tokens where the logits are."""

    def begin(self, draws: Draws) -> StepSampling:
        """Prepare the sampling of a step whose logits are not computed yet."""
