"""What a request wants of its prompt besides KV: log-probabilities of its tokens, or an embedding.

Both are found while the prompt is computed (`results.py`), and kept here across
chunks and preemptions. KV is reused only of tokens for which this is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.protocol import SamplingParams, TokenLogprobs


@dataclass(slots=True, eq=False)
class PromptWork:
    """The work on one request's prompt, as far as it is done."""

    sampling: SamplingParams  # says what is wanted
    num_prompt_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second token on
    num_pooled_states: int = 0  # number of the embedding's states summed so far in ...
    pooled_states: npt.NDArray[np.float64] | None = None  # ... this sum: [hidden_size]

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading prompt tokens that need not be computed if their KV is available."""
        if self.sampling.prompt_logprobs is not None:
            return len(self.logprobs)
        missing = self.missing_states
        return missing.start if missing else self.num_prompt_tokens - 1

    @property
    def missing_states(self) -> range:
        """Positions of prompt tokens whose final states the embedding still lacks."""
        pooling = self.sampling.pooling
        if pooling is None:
            return range(0)
        return pooling.positions(self.num_prompt_tokens)[self.num_pooled_states :]

    @property
    def embedding(self) -> bytes:
        """The mean of its pooled states as little-endian float32; empty if there are none."""
        if self.pooled_states is None:
            return b""
        return (self.pooled_states / self.num_pooled_states).astype("<f4").tobytes()

    def scored_positions(self, begin: int, end: int) -> range:
        """Positions in [begin, end) whose logits give log-probabilities of the next tokens."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        num_scored = len(self.logprobs)
        assert begin <= num_scored, "KV is reused of scored tokens alone"
        return range(num_scored, min(end, self.num_prompt_tokens - 1))

    def pooled_positions(self, begin: int, end: int) -> range:
        """Positions in [begin, end) whose final states are the next ones to pool."""
        missing = self.missing_states
        assert not missing or begin <= missing.start, "KV is reused of pooled tokens alone"
        return range(missing.start, min(end, missing.stop))

    def add_states(self, total: npt.NDArray[np.float64], num_states: int) -> None:
        """Add the sum of the next `num_states` states of the embedding."""
        self.num_pooled_states += num_states
        self.pooled_states = total if self.pooled_states is None else self.pooled_states + total
