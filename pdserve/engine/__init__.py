"""The engine: model, weights, paged KV, block pool, scheduler, sampler. Knows nothing of networks.

It deals in token ids only, and runs the same code for a prefill node, a decode node and the
co-located mode: a request's `num_computed_tokens` chases its `num_tokens`, and there is no phase.
"""

import os

# torch's OpenMP threads would spin after each operation, on the cores that our own kernels' threads
# need next: a step of alternating torch and native operations got several times slower. Read when
# torch is loaded, which everything here comes before.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
