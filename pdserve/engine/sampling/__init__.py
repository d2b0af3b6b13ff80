"""Sampling as a pure function of logits, parameters, seed, position and token history.

No state is kept between steps, so a request gets the same tokens on whichever nodes it runs,
however it is batched, and wherever it is resumed.
"""

from __future__ import annotations

from pdserve.engine.sampling.sampler import sample

__all__ = ["sample"]
