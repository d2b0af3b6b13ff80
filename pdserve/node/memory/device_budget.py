"""How much of a GPU's memory a node takes for KV: what weights and one worst step leave of it."""

from __future__ import annotations

from typing import Final

from pdserve.engine.cuda.attention.split_keys import partial_bytes
from pdserve.engine.cuda.capture.piece_sizes import MOST_PIECE_ROWS
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.engine.steps.worst import LargestStep, largest_part
from pdserve.shared.errors import ConfigError

GRAPH_BYTES: Final = 1 << 30  # captured decode steps; `MAX_GRAPH_BYTES` is for very large models
FIXED_BYTES: Final = 512 << 20  # kernels, staging, workspaces of libraries
_FLOAT_BYTES: Final = 4
_INTEGER_BYTES: Final = 3  # of an input: two planes, and numbers of 16 and of 32 inputs
# As computed and with penalties; what filters and ranks keep of them. Of several answers to one
# prompt, too, no more rows are there at a time than a step has requests (CudaSampler).
_LOGITS_COPIES: Final = 5


def step_bytes(
    model: ModelConfig,
    dtype: ActivationDtype,
    step: LargestStep,
    shard: Shard = WHOLE,
    *,
    has_graphs: bool = True,
    has_codes: bool = False,
) -> int:
    """Return an upper bound of what a step's tensors take at a time, on the device of one rank.

    That includes CUDA graphs, if there are any. Of a layer, the widest moment counts: the residual,
    its norm, and either queries, keys, values and their attention or the two halves of the MLP and
    their product. With experts, a token has those of each that it chooses, and float32 results of
    each besides. `has_codes`: what products with codes take becomes integers first.
    """
    own, most_rows = shard.of(model), largest_part(step.num_tokens, shard.num_stages)
    heads = own.num_heads * model.pair_dim + 2 * own.num_kv_heads * model.head_dim
    if own.latent is not None:  # queries before keys are absorbed, and values of heads
        heads += own.num_heads * (own.latent.query_dim + own.latent.value_dim)
    inner = 3 * max(own.inner_widths)
    if own.experts is not None:
        results = model.hidden_size * _FLOAT_BYTES // dtype.itemsize
        inner = max(inner, own.experts.num_chosen * (3 * own.experts.intermediate_size + results))
    widest = 2 * model.hidden_size + max(heads, inner) + model.hidden_size
    if has_codes:
        widest += _INTEGER_BYTES * max(heads, inner // 3, model.hidden_size) // dtype.itemsize
    activations = most_rows * widest * dtype.itemsize
    heads_of = own.num_heads, own.num_kv_heads, model.head_dim, model.value_dim
    attention = partial_bytes(step.num_requests, *heads_of)
    graphs = 0
    if has_graphs:
        # Captured pieces of steps have memory of their own for as much, and what they hand on.
        residual = model.hidden_size * _FLOAT_BYTES // dtype.itemsize
        carried = residual + own.num_heads * model.pair_dim
        pieces = min(most_rows, MOST_PIECE_ROWS) * (widest + carried) * dtype.itemsize
        graphs = GRAPH_BYTES + pieces
    logits = step.num_requests * model.vocab_size * _FLOAT_BYTES * _LOGITS_COPIES
    contexts = 0 if shard.is_whole else FIXED_BYTES  # NCCL, and rank 0 on the others' devices
    return activations + attention + graphs + logits + FIXED_BYTES + contexts


def gpu_kv_bytes(
    free_bytes: int, total_bytes: int, utilization: float, weights_bytes: int, step_bytes: int
) -> int:
    """Return the size of the KV pool of a node whose weights are not loaded yet.

    Args:
        free_bytes: free memory of the GPU now.
        total_bytes: all of it.
        utilization: share of all of it that the node may take; what others have is not counted.
        weights_bytes: of the model.
        step_bytes: of the worst step.

    Raises:
        ConfigError: nothing is left; with the numbers.
    """
    allowed_bytes = min(int(total_bytes * utilization), free_bytes)
    left_bytes = allowed_bytes - weights_bytes - step_bytes
    if left_bytes <= 0:
        raise ConfigError(
            f"no GPU memory is left for KV: {_mib(free_bytes)} of {_mib(total_bytes)} are free, "
            f"kv_utilization {utilization:g} allows {_mib(allowed_bytes)}, weights take "
            f"{_mib(weights_bytes)} and the largest step {_mib(step_bytes)}; raise kv_utilization, "
            "lower token_budget or max_batch_size, or take a larger GPU or several"
        )
    return left_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
