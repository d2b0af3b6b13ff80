"""Tokens chosen by kernels are those that the CPU chooses of the same logits; one copy each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.matrix import examples, matrix

pytest.importorskip("triton")

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling.interface import Draws
from pdserve.engine.sampling.sampler import sample_natively, with_allowed_ids
from pdserve.shared.errors import NoTokenLeft, RequestsFailed, UnusableLogits
from tests.fakes.late_copies import PromptCopies
from tests.kernels.sampling_cases import EOS, FILTERS, logits, make_row, rows
from tests.requests import make_request
from tests.unit.engine_cuda.compilations import compilations
from tests.unit.engine_cuda.test_launch_counts import SAMPLINGS

pytestmark = pytest.mark.usefixtures("interpreted")

Outcome = list[SampledToken] | RequestsFailed


def by_kernels(
    logits: Tensor,
    requests: Sequence[Request],
    masks: TokenMasks | None = None,
    rows: list[int] | None = None,
    copies: PromptCopies | None = None,
    most_draws: int = 64,
) -> list[SampledToken]:
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.sampling.sampler import CudaSampler  # once kernels are interpreted

    sampler = CudaSampler(Staging(copies or PromptCopies()), logits.shape[1], most_draws)
    sampling = sampler.begin(Draws(requests, rows, masks, EOS))
    sampling.launch(logits)
    return sampling.tokens()


def natively(
    logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None
) -> list[SampledToken]:
    masks = with_allowed_ids(masks, requests, logits.shape[1])
    return sample_natively(logits, requests, EOS, masks=masks)


def outcome(sample: Callable[..., list[SampledToken]], *arguments: object) -> Outcome:
    """The tokens, or why there are none: biases and endings can leave nothing to choose."""
    try:
        return sample(*arguments)
    except RequestsFailed as error:
        return error


def expect_same(
    logits: Tensor, requests: Sequence[Request], masks: TokenMasks | None = None
) -> None:
    before = logits.clone()
    expected = outcome(natively, logits, requests, masks)
    tokens = outcome(by_kernels, logits, requests, masks)
    assert torch.equal(logits, before)
    if isinstance(expected, RequestsFailed) or isinstance(tokens, RequestsFailed):
        assert str(tokens) == str(expected)
        return
    assert [token.token_id for token in tokens] == [token.token_id for token in expected]
    for token, wanted in zip(tokens, expected, strict=True):
        assert (token.logprobs is None) == (wanted.logprobs is None)
        if token.logprobs is not None and wanted.logprobs is not None:
            assert token.logprobs.top_ids == wanted.logprobs.top_ids
            numbers = [token.logprobs.chosen, *token.logprobs.top_logprobs]
            assert numbers == pytest.approx(
                [wanted.logprobs.chosen, *wanted.logprobs.top_logprobs], rel=1e-5, abs=1e-5
            )


@settings(max_examples=examples(12))
@given(row=logits(), requests=rows(with_logprobs=True))
def test_tokens_are_those_of_the_cpu(row: Tensor, requests: list[Request]) -> None:
    """Whatever is asked for: filters, penalties, biases, endings, log-probabilities."""
    expect_same(row.repeat(len(requests), 1), requests)


@settings(max_examples=8)
@given(row=logits(), requests=rows(), data=st.data())
def test_masked_tokens_are_those_of_the_cpu(
    row: Tensor, requests: list[Request], data: st.DataObject
) -> None:
    masked = sorted(data.draw(st.sets(st.integers(0, len(requests) - 1))))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    num_words = -(-len(row) // 32) + 1  # bits behind the vocabulary are set at random
    bits = generator.random((len(masked), num_words, 32)) < 0.3
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)[..., 0]
    expect_same(row.repeat(len(requests), 1), requests, TokenMasks(masked, words))


@pytest.mark.long
@pytest.mark.parametrize("spread", matrix([2.0, 0.0], 1))
def test_tokens_of_a_large_vocabulary(spread: float) -> None:
    """Of several tiles. Flat: all tokens are candidates for the nucleus."""
    batch = torch.stack([make_row(5000, seed=i, spread=spread) for i in range(len(FILTERS))])
    requests = [
        make_request([0], **({"temperature": 1.0, "seed": i, "logprobs": 5} | filters))
        for i, filters in enumerate(FILTERS)
    ]
    expect_same(batch, requests)


def test_allowed_ids_and_listed_logprobs() -> None:
    batch = make_row(70, spread=3.0).repeat(3, 1)
    requests = [
        make_request([0], allowed_token_ids=[3, 40, 1000], temperature=1.0, seed=5),
        make_request([0], logprobs=2, logprob_token_ids=[9, 5, 9, 1000]),
        make_request([0], logprobs=2, temperature=2.0, seed=1, repetition_penalty=1.5),
    ]
    expect_same(batch, requests)


def test_several_draws_of_one_row() -> None:
    """As token 1 of several answers to one prompt."""
    batch = torch.stack([make_row(300, seed=seed) for seed in (1, 2)])
    owners = [0, 0, 1, 1, 1]
    requests = [
        make_request([0], seed=i, temperature=1.0, logprobs=i % 3, presence_penalty=i % 2)
        for i in range(5)
    ]
    found = by_kernels(batch, requests, rows=owners)
    assert [t.token_id for t in found] == [t.token_id for t in natively(batch[owners], requests)]


class Allocations(TorchDispatchMode):
    """Remembers how many rows as wide as the logits are allocated, of all tensors."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.most_rows = 0
        self._vocab_size = vocab_size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if "empty" in str(function) and result.ndim == 2 and result.shape[1] >= self._vocab_size:
            self.most_rows = max(self.most_rows, len(result))
        return result


def answers_to(prompts: int, answers: int) -> tuple[list[int], list[Request]]:
    """Draws of all kinds: (rows, requests)."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 4, "temperature": 0.7, "top_k": 9},
        {"presence_penalty": 0.5, "logit_bias": {3: 2.0}},
        {"repetition_penalty": 1.3, "logprobs": 1, "logprob_token_ids": [2, 5]},
        {"allowed_token_ids": list(range(0, 300, 7)), "temperature": 1.0},
    ]
    rows = [row for row in range(prompts) for _ in range(answers)]
    return rows, [make_request([1, 2], [4], seed=i, **kinds[i % 5]) for i in range(len(rows))]


@pytest.mark.long
@pytest.mark.parametrize("most_draws", matrix([3, 1, 4], 1))
def test_memory_is_for_requests_and_not_for_their_answers(most_draws: int) -> None:
    """And each answer is what it is when all are sampled at once, masks of grammars included."""
    vocab_size = 300
    batch = torch.stack([make_row(vocab_size, seed=seed) for seed in (1, 2)])
    owners, requests = answers_to(2, 6)
    masked = [0, 4, 5, 11]
    bits = np.random.default_rng(0).random((len(masked), 10, 32)) < 0.5
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)[..., 0]
    masks = TokenMasks(masked, words)
    at_once = by_kernels(batch, requests, masks, owners)
    with Allocations(vocab_size) as allocations:
        found = by_kernels(batch, requests, masks, owners, most_draws=most_draws)
    assert found == at_once
    assert allocations.most_rows == most_draws


def test_more_draws_than_there_is_memory_for_wait_once_a_round() -> None:
    copies = PromptCopies()
    owners, requests = answers_to(1, 7)
    by_kernels(make_row(300).repeat(1, 1), requests, None, owners, copies, most_draws=3)
    assert len(copies.started) == len(copies.fetched) == 3


@pytest.mark.parametrize("temperature", matrix([0.0, 1.0], 1))
def test_the_error_says_whose_fault_it_is(temperature: float) -> None:
    requests = [
        make_request([0], request_id="masked", temperature=temperature),
        make_request([0], request_id="ends held back", stop_token_ids=range(32), min_tokens=2),
        make_request([0], request_id="damaged", temperature=temperature, logprobs=1),
        make_request([0], request_id="fine", logprobs=1),
    ]
    logits = make_row(32).repeat(len(requests), 1)
    masks = TokenMasks([0], np.zeros((1, 1), dtype=np.int32))
    with pytest.raises(NoTokenLeft) as theirs:
        by_kernels(logits, requests, masks)
    assert theirs.value.request_ids == ["masked", "ends held back"]
    for poison in (float("nan"), float("inf")):
        logits[2, 7] = poison
        with pytest.raises(UnusableLogits, match="are damaged") as ours:
            by_kernels(logits, requests, masks)
        assert ours.value.request_ids == ["damaged"]


def test_everything_goes_up_in_one_copy_and_comes_down_in_one() -> None:
    copies = PromptCopies()
    requests = [
        make_request([0, 1, 2], [3], logprobs=3, seed=1, temperature=1.0, top_p=0.9, top_k=20),
        make_request([0, 1], [3], repetition_penalty=1.2, frequency_penalty=0.1, min_tokens=9),
        make_request([0], logit_bias={4: 1.0}, allowed_token_ids=list(range(30))),
    ]
    by_kernels(make_row(40).repeat(3, 1), requests, copies=copies)
    assert len(copies.started) == len(copies.fetched) == 1
    assert copies.num_waits == 1


def test_every_kernel_is_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from pdserve.engine.cuda.copies.staging import Staging
    from pdserve.engine.cuda.sampling.sampler import CudaSampler

    vocab_size = 40
    sampler = CudaSampler(Staging(PromptCopies()), vocab_size, 64)
    with compilations(monkeypatch) as before:
        sampler.warm_up(torch.device("cpu"))
    masks = TokenMasks([0], np.full((1, 2), 0x55555555, np.int32))
    for asked, (fields, _) in SAMPLINGS.items():
        request = make_request([0, 1, 2], [3], **fields)
        draws = Draws([request] * 3, None, masks if "grammar" in fields else None, EOS)
        with compilations(monkeypatch) as found:
            sampling = sampler.begin(draws)
            sampling.launch(make_row(vocab_size).repeat(3, 1))
            sampling.tokens()
        assert found, asked
        assert found <= before, asked
