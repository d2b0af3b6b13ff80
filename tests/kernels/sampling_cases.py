"""Rows of logits and ragged parameters that the sampling tests draw."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdserve.engine.request import Request
from pdserve.protocol import BadWord
from tests.requests import make_request

EOS = frozenset({2})

# Around vectors, small blocks and blocks of the kernels, and around what is sorted or bucketed.
SIZES = [1, 2, 15, 16, 17, 63, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2500, 5000]

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 40},
    {"top_k": 2000},
    {"top_p": 0.95},
    {"top_p": 0.1},
    {"min_p": 0.05},
    {"top_k": 400, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.001, "top_p": 0.999},
]

_changes = {
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 20), st.floats(-100, 100), max_size=4),
    "min_tokens": st.integers(0, 4),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 20), max_size=3),
    "bad_words": st.lists(
        st.builds(BadWord, token_ids=st.lists(st.integers(0, 20), min_size=1, max_size=2)),
        max_size=3,
    ),
}
_choices = {
    "temperature": st.sampled_from([0.0, 1e-6, 1e-5, 0.01, 0.3, 0.7, 1.0, 1.5, 100.0, 1e30]),
    "top_k": st.one_of(st.integers(0, 50), st.sampled_from([256, 257, 1000, 10**6])),
    "top_p": st.one_of(st.floats(0, 1), st.sampled_from([1.0, 0.9, 0.999999, 1e-9])),
    "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
}
_logprobs = {"logprobs": st.one_of(st.none(), st.integers(0, 25))}
_histories = st.lists(st.integers(0, 20), max_size=40)  # some ids have no logit


def rows(*, with_logprobs: bool = False) -> st.SearchStrategy[list[Request]]:
    """A ragged batch: any parameters, any history."""
    optional = _changes | _choices | (_logprobs if with_logprobs else {})
    sampling = st.fixed_dictionaries({"seed": st.integers(0, 2**64 - 1)}, optional=optional)

    def request(prompt: list[int], output: list[int], sampling: dict[str, Any]) -> Request:
        return make_request([0, *prompt], output, **sampling)

    return st.lists(st.builds(request, _histories, _histories, sampling), min_size=1, max_size=6)


def logits() -> st.SearchStrategy[Tensor]:
    """[vocab_size] float32: flat or peaked, with many ties, with impossible tokens; finite peak."""
    return st.builds(
        make_row,
        st.one_of(st.sampled_from(SIZES), st.integers(1, 600)),
        seed=st.integers(0, 99),
        spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0, 1e4]),
        num_levels=st.sampled_from([0, 0, 2, 30]),
        share_impossible=st.sampled_from([0.0, 0.0, 0.5, 0.999]),
    )


def make_row(
    vocab_size: int,
    *,
    seed: int = 0,
    spread: float = 2.0,
    num_levels: int = 0,
    share_impossible: float = 0.0,
) -> Tensor:
    """Normal logits; `num_levels` makes ties of them, 0 leaves them alone."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(vocab_size, generator=generator)
    if num_levels:
        row = (row * num_levels / 4).round() * 4 / num_levels
    row *= spread
    is_impossible = torch.rand(vocab_size, generator=generator) < share_impossible
    row[is_impossible] = float("-inf")
    row[seed % vocab_size] = row[row.isfinite()].max() if (row.isfinite()).any() else 0.0
    return row
