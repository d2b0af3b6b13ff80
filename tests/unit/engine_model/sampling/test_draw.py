"""Random tokens: the filters against transformers, the draws against exact probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdserve.engine.sampling import draw, sample
from pdserve.engine.sampling.adjust import adjust_logits
from pdserve.engine.sampling.draw import draw_tokens
from pdserve.engine.sampling.filters import filter_weights
from pdserve.engine.sampling.inverse_cdf import invert_cdf
from pdserve.engine.sampling.uniform import philox, uniforms
from pdserve.engine.sampling.weights import relative_weights
from pdserve.protocol import SamplingParams
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.sampling.test_sampler import make_logits

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 400, "top_p": 0.3},
    {"min_p": 0.001, "top_p": 0.3},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.8, "min_p": 0.05, "top_k": 20, "top_p": 0.95},
]


def warped_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The same filters, in the same order, from the reference."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits[None])[0].softmax(dim=-1)


def filtered_probabilities(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """[num_rows, vocab_size]: the candidates of all rows, whatever their width."""
    weights = relative_weights(logits, logits.amax(dim=-1), params)
    result = torch.full_like(logits, float("nan"))
    for candidates in filter_weights(weights, params):
        if candidates.token_ids is None:
            result[candidates.rows] = candidates.weights
        else:
            narrow = torch.zeros(len(candidates.rows), logits.shape[1])
            result[candidates.rows] = narrow.scatter(1, candidates.token_ids, candidates.weights)
    return result / result.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("flatness", [1.0, 20.0])
def test_filters_are_those_of_transformers(flatness: float) -> None:
    params = [SamplingParams(**filters) for filters in FILTERS]
    logits = make_logits(len(params), 2000) / flatness
    ours = filtered_probabilities(logits, params)
    for row, row_params in enumerate(params):
        expected = warped_by_transformers(logits[row], row_params)
        assert torch.equal(ours[row] > 0, expected > 0), row_params
        torch.testing.assert_close(ours[row], expected, atol=1e-6, rtol=1e-4)


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = make_logits(1)
    request = make_request([3, 4, 4, 5], [9, 9, 10], repetition_penalty=1.3)
    history = torch.tensor([request.prompt_token_ids + request.output_token_ids])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    torch.testing.assert_close(adjust_logits(logits, [request], frozenset()), expected)


def test_equals_stay_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = filtered_probabilities(logits, [SamplingParams(top_k=2)])[0] > 0
    assert kept.tolist() == [True, True, True, True, False]
    kept = filtered_probabilities(logits, [SamplingParams(top_p=0.6)])[0] > 0
    assert kept.tolist() == [True, True, True, True, False]


@pytest.mark.parametrize(
    "filters",
    matrix([{"top_p": 0.8}, {}, {"temperature": 0.6}, {"top_k": 5}, {"min_p": 0.2}], 1),
    ids=str,
)
def test_draws_have_the_exact_probabilities(filters: dict[str, Any]) -> None:
    num_draws, vocab_size = 16_000, 12
    params = SamplingParams(**filters)
    expected = warped_by_transformers(make_logits(1, vocab_size)[0], params).double()
    logits = make_logits(1, vocab_size).expand(num_draws, vocab_size)
    # Half of the draws differ in their seeds, half in their positions.
    sampling = {"temperature": 1.0} | filters
    requests = [
        make_request([0], seed=i, **sampling)
        if i % 2
        else make_request([0] * (i % 400), seed=i // 400, **sampling)
        for i in range(num_draws)
    ]
    tokens = torch.tensor([token.token_id for token in sample(logits, requests, frozenset())])
    counts = tokens.bincount(minlength=vocab_size).double()
    possible = expected > 0
    assert not counts[~possible].any()
    wanted = expected[possible] * num_draws
    chi_square = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    degrees = int(possible.sum()) - 1
    # Six standard deviations above the mean of a chi-square distribution.
    assert chi_square < degrees + 6 * (2 * degrees) ** 0.5


ENDS = [0.0, 1.0 - 2.0**-52]


def test_the_ends_of_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 2.0, -60.0, float("-inf")]]).expand(2, 5)
    requests = [make_request([0], temperature=1.0)] * 2
    monkeypatch.setattr(draw, "uniforms", lambda seeds, positions: np.array(ENDS))
    first, last = draw_tokens(logits, torch.tensor([2.0, 2.0]), requests)
    assert first == 1, "never a token of probability 0"
    assert last in {2, 3}


@pytest.mark.parametrize("width", [3, 1024, 1025, 4099])
def test_the_inverse_cdf_is_exact(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(1, width, generator=generator) ** 8
    weights = (weights * 2.0**34).round() * 2.0**-34
    weights[:, ::3] = 0.0
    weights[:, -1] = 0.0
    numbers = torch.rand(5000, generator=generator, dtype=torch.float64)
    numbers = torch.cat((torch.tensor(ENDS, dtype=torch.float64), numbers))
    numbers = (numbers * 2.0**52).floor() * 2.0**-52
    index = invert_cdf(weights.expand(len(numbers), width), numbers)
    assert (weights[0, index] > 0).all()
    cdf = weights[0].double().cumsum(0)
    targets = numbers * cdf[-1]
    assert (targets < cdf[index]).all()
    assert (targets >= cdf[index] - weights[0, index]).all()
    assert len(index.unique()) > width / 20


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 100.0, 1e30])
def test_weights_add_up_exactly_in_any_order(temperature: float) -> None:
    logits = torch.cat((make_logits(1, 50_000), make_logits(1, 50_000) * 5), dim=1)
    peak = logits.max()
    logits[0, 7] = float("-inf")
    params = [SamplingParams(temperature=temperature)]
    weights = relative_weights(logits, peak[None], params)[0]
    expected = ((logits[0].double() - peak) / temperature).exp()
    torch.testing.assert_close(weights.double(), expected, atol=2.0**-34, rtol=2e-6)
    assert weights.max() == 1.0
    assert weights[7] == 0.0
    units = weights.double() * 2.0**34
    assert torch.equal(units, units.round())
    for order in (torch.randperm(len(units)), torch.arange(len(units)).flip(0)):
        assert units[order].cumsum(0)[-1].item() == sum(map(int, units.tolist()))


def test_philox_known_answer() -> None:
    words = philox([0], [0])
    assert [int(w[0]) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_uniforms_are_uniform_and_independent() -> None:
    num = 20_000
    for numbers in (
        uniforms(range(num), [5] * num),
        uniforms([5] * num, range(num)),
        uniforms([2**63 + 5] * num, range(num)),
    ):
        assert 0.0 <= numbers.min() < numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
        assert ((counts - num / 50) ** 2 / (num / 50)).sum() < 49 + 6 * 98**0.5
        neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(neighbours) < 5 / num**0.5
