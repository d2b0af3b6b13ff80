"""Machines to simulate: published costs, so that results can be compared with the literature."""

from __future__ import annotations

from pdserve.commands.simulation.machine import Machine
from pdserve.protocol import StepCosts, TransferCosts

# OPT-13B on one A100-80GB, as in DistServe's simulator (OSDI'24): a prompt of t tokens takes 18.1 +
# 0.102 t + 7.1e-6 t^2 ms, decoding B requests 19.9 + 6.3e-4 context + 0.0385 B ms. Its KV would be
# 819 KB per token; the value here is a fifth of that, as with today's grouped-query attention. The
# link is an InfiniBand port of 200 Gb/s.
A100_13B = Machine(
    costs=StepCosts(
        knot_tokens=[1, 64, 128, 256, 512, 1024, 2048],
        knot_s=[0.0199, 0.0246, 0.0312, 0.0442, 0.0703, 0.1225, 0.227],
        pair_s=1.42e-8,
        context_s=6.3e-7,
    ),
    num_kv_tokens=256 * 1024,
    kv_token_bytes=160 * 1024,
    transfer=TransferCosts(transport="ucx", fixed_s=0.002, bytes_per_s=20e9),
)

# 25 million weights on one Zen 4 core, as measured by `pdserve bench perf-model`: there attention
# of a chunk with a long context takes longer than everything else.
ONE_CORE_25M = Machine(
    costs=StepCosts(
        knot_tokens=[1, 8, 16, 32, 64, 128, 256, 512],
        knot_s=[0.0029, 0.0034, 0.0052, 0.0090, 0.0161, 0.0304, 0.0591, 0.1163],
        sampled_s=7.6e-5,
        pair_s=8.4e-8,
        context_s=2.7e-7,
    ),
    num_kv_tokens=128 * 1024,
    kv_token_bytes=3 * 1024,
    transfer=TransferCosts(transport="shm", fixed_s=0.001, bytes_per_s=5e9),
    token_budget=512,
    max_batch_size=64,
    block_size=16,
)

# 53 million weights (100 MB, which no cache holds) on one Zen 4 core, measured in the same way.
ONE_CORE_53M = Machine(
    costs=StepCosts(
        knot_tokens=[1, 4, 8, 16, 32, 64, 128, 256],
        knot_s=[0.0048, 0.0055, 0.0059, 0.0085, 0.0163, 0.0314, 0.0612, 0.1202],
        sampled_s=9.0e-5,
        pair_s=1.53e-7,
        context_s=3.0e-7,
    ),
    num_kv_tokens=128 * 1024,
    kv_token_bytes=6 * 1024,
    transfer=TransferCosts(transport="shm", fixed_s=0.001, bytes_per_s=5e9),
    token_budget=512,
    max_batch_size=64,
    block_size=64,
)
