"""Tensor and pipeline parallelism on one host: several processes compute each step together.

Rank 0 is the node itself. The others have no state of their own but weights: `docs/MODEL_STEP.md`.
"""
