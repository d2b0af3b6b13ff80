"""Whole clusters' lives, each from one seed, on one event loop with virtual time.

    python -m tests.lives --seeds 5000        # many; a failing one prints how to repeat it

The coordinator and the nodes are the real ones, down to the gRPC streams. What is made here is the
time (`loop`), what carries messages (`network`) and KV (`transport`), what computes steps
(`machine`, `kv`), and what goes wrong (`faults`). KV says of which tokens it was computed, and what
is sampled depends on all the KV that is read: whatever is stale, torn, lost or doubled anywhere
shows in the tokens of an answer (`checker`).
"""
