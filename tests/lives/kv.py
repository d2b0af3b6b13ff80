"""KV that says of which tokens it was computed, and what is sampled from it.

The KV of a token is a hash of all tokens up to it, made from the KV of the token before it as it is
found in the pool. What is sampled depends on the KV of every token, in each layer, as it is read
through the block table; and on the seed, the number of output tokens so far and what the request
asks for. `expected` says what an undisturbed run would have sampled, without any pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from coordinator.generation import GenerationRequest
from kv_transfer.memory import ExportedPool
from pdserve.engine.request import SampledToken
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import FinishReason, SamplingParams, TokenLogprobs

BLOCK = 4
NUM_LAYERS = 3
LAYOUT = KvLayout(
    num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=2, block_size=BLOCK, dtype=KvDtype.FLOAT32
)  # 8 bytes are one number for each token, in K and V of each layer
VOCAB_SIZE = 64
EOS = 0
POISON = VOCAB_SIZE - 1  # no node survives computing it; never sampled
MOST_TOKENS = 512

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_HALVES = NUM_LAYERS * 2
_FACTORS = [(2 * i + 3) * _START & _MASK for i in range(_HALVES)]  # of layer and K or V
_WEIGHTS = list(  # of the position
    accumulate(range(MOST_TOKENS), lambda w, _: (w * 6364136223846793005 + 1442695) & _MASK)
)
_FACTOR_SUM = sum(_FACTORS) & _MASK
_OFFSET_SUM = sum(i * factor for i, factor in enumerate(_FACTORS)) & _MASK
_NP_FACTORS = np.array(_FACTORS, np.uint64).reshape(1, NUM_LAYERS, 2, 1)
_NP_WEIGHTS = np.array(_WEIGHTS, np.uint64)
_NP_OFFSETS = np.arange(_HALVES, dtype=np.uint64).reshape(NUM_LAYERS, 2)


def _mixed(*numbers: int) -> int:
    value = _START
    for number in numbers:
        value = (value ^ number) * 0xD6E8FEB86659FD93 & _MASK
        value ^= value >> 32
    return value


def _number_of(adapter: str) -> int:
    """What changes every token's KV; 0: that of the model itself."""
    return int(adapter or "0", 16) << 8 & _MASK


class KvNumbers:
    """A pool's KV as numbers: [block, layer, K or V, slot]."""

    def __init__(self, pool: ExportedPool) -> None:
        shape = (pool.num_blocks, NUM_LAYERS, 2, BLOCK)
        self._numbers: NDArray[np.uint64] = pool.data.view(np.uint64).reshape(shape)

    def compute(
        self,
        table: NDArray[np.int64],
        tokens: Sequence[int],
        begin: int,
        end: int,
        adapter: str = "",
        adapted_from: int = 0,
    ) -> NDArray[np.uint64]:
        """Return the KV of these tokens with an adapter, given the one in the pool before them."""
        adapted = _number_of(adapter)
        chain = _START
        if begin:
            last = begin - 1
            chain = int(self._numbers[table[last // BLOCK], 0, 0, last % BLOCK])
        chains = []
        for position, token in enumerate(tokens[begin:end], begin):
            chain = _mixed(chain, token ^ adapted if position >= adapted_from else token)
            chains.append(chain)
        return np.array(chains, np.uint64)

    def write(
        self, table: NDArray[np.int64], begin: int, chains: NDArray[np.uint64], layer: int
    ) -> None:
        """Write the KV of one layer."""
        positions = np.arange(begin, begin + len(chains))
        self._numbers[table[positions // BLOCK], layer, :, positions % BLOCK] = (
            chains[:, None] + _NP_OFFSETS[layer]
        )

    def read(self, table: NDArray[np.int64], num_tokens: int) -> int:
        """Return a number that depends on all KV of the first tokens."""
        found = (self._numbers[table] * _NP_FACTORS).sum((1, 2), dtype=np.uint64)
        return int((found.reshape(-1)[:num_tokens] * _NP_WEIGHTS[:num_tokens]).sum())


def sampled(kv: int, sampling: SamplingParams, num_output: int) -> SampledToken:
    """Return what is sampled after this KV, as output token number `num_output`."""
    seed = sampling.seed if sampling.temperature else 0
    drawn = _mixed(kv, seed, num_output)
    token = drawn % POISON
    if num_output + 1 < sampling.min_tokens:
        ends = {EOS, *sampling.stop_token_ids}
        while token in ends:
            token = (token + 1) % POISON
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = TokenLogprobs(chosen=-(drawn % 1009) / 64)
    return SampledToken(token, logprobs)


@dataclass(frozen=True)
class Answer:
    """What a client is to be told in the end."""

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[float]


def expected(request: GenerationRequest, adapter: str = "", adapted_from: int = 0) -> Answer:
    """Return the answer to a request that nothing has disturbed, with an adapter."""
    sampling, adapted = request.sampling, _number_of(adapter)
    chain, kv = _START, 0
    output: list[int] = []
    logprobs: list[float] = []
    if sampling.max_tokens == 0:
        return Answer([], FinishReason.LENGTH, [])
    for position in range(len(request.prompt.token_ids) + sampling.max_tokens):
        num_prompt = len(request.prompt.token_ids)
        if position < num_prompt:
            token = request.prompt.token_ids[position]
        else:
            found = sampled(kv, sampling, len(output))
            token = found.token_id
            output.append(token)
            if found.logprobs is not None:
                logprobs.append(found.logprobs.chosen)
            ends = set(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                ends.add(EOS)
            if token in ends and len(output) >= sampling.min_tokens:
                return Answer(output, FinishReason.STOP, logprobs)
            if len(output) == sampling.max_tokens:
                break
        chain = _mixed(chain, token ^ adapted if position >= adapted_from else token)
        kv = (kv + _WEIGHTS[position] * (_FACTOR_SUM * chain + _OFFSET_SUM)) & _MASK
    return Answer(output, FinishReason.LENGTH, logprobs)
