"""Several GPUs: the processes that compute a step with rank 0, the node itself.

Each has a GPU, its share of the weights, and the KV of its own layers and heads, in memory that
rank 0 has allocated: `docs/MODEL_STEP.md`.
"""
