"""The engine: model, weights, paged KV cache, block pool, scheduler and sampler. No networking.

It works on token ids only and runs the same code on a prefill node, on a decode node and in
co-located mode. Requests have no phase: each step advances `num_computed_tokens` towards
`num_tokens`.
"""

import os

# By default, torch's OpenMP threads spin after each operation, on the cores that our own kernel
# threads need next: steps that alternate torch and native operations became several times slower.
# The variable is read when torch is loaded, so it must be set here, before any import of torch.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
