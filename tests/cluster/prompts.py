"""The tokens of these tests, without what it takes to make models."""

from __future__ import annotations

import random

EOS_TOKEN = "<|end|>"
EOS_TOKEN_ID = 256  # the others are bytes


def make_prompt(num_tokens: int, seed: object = 0) -> list[int]:
    """Random token ids, the same ones for the same arguments."""
    return random.Random(f"{num_tokens} {seed}").choices(range(256), k=num_tokens)
