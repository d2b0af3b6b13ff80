"""Choosing tokens: the definitions against plain Python, and what must not matter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request
from pdserve.engine.sampling import sample
from pdserve.engine.sampling.adjust import adjust_logits
from pdserve.engine.sampling.torch_sampler import sample_by_torch
from pdserve.protocol import BadWord
from pdserve.shared.errors import NoTokenLeft, UnusableLogits
from tests.requests import make_request

EOS = frozenset({2})
VOCAB_SIZE = 700


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def choose(logits: torch.Tensor, *requests: Request) -> list[int]:
    return [token.token_id for token in sample(logits, requests, EOS)]


# ---- greedy --------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    assert choose(logits, make_request([0]), make_request([0])) == [1, 0]
    assert choose(logits[:1], make_request([0], temperature=1e-6)) == [1]


def test_greedy_with_changes() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0, 0.0]])
    assert choose(logits, make_request([0], logit_bias={3: 9.0})) == [3]
    assert choose(logits, make_request([0], [1], presence_penalty=1.5)) == [2]
    assert choose(logits, make_request([0], [1, 1], frequency_penalty=0.6)) == [2]
    assert choose(logits, make_request([1], repetition_penalty=2.0)) == [2]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_name_their_requests(poison: float, temperature: float) -> None:
    logits = make_logits(3)
    logits[1, 5] = poison
    requests = [make_request([0], request_id=name, temperature=temperature) for name in "abc"]
    with pytest.raises(UnusableLogits, match="for b are not finite") as raised:
        sample(logits, requests, EOS)
    assert raised.value.request_ids == ["b"]
    logits[:] = float("-inf")
    with pytest.raises(UnusableLogits, match="a, b, c"):
        sample(logits, requests, EOS)


# ---- endings, bias, penalties --------------------------------------------------------------------


def adjusted_by_hand(logits: list[float], request: Request, eos: frozenset[int]) -> list[float]:
    """The definitions, one token at a time."""
    sampling, output = request.sampling, request.output_token_ids
    seen, counts = set(request.prompt_token_ids + output), Counter(output)
    bad_words = [word.token_ids for word in sampling.bad_words]
    result = []
    for token_id, score in enumerate(logits):
        ends = token_id in sampling.stop_token_ids
        ends |= token_id in eos and not sampling.ignore_eos
        is_bad = any([*output, token_id][-len(ids) :] == ids for ids in bad_words)
        if is_bad or (ends and len(output) < sampling.min_tokens):
            score = float("-inf")
        score += sampling.logit_bias.get(token_id, 0.0)
        if token_id in seen:
            penalty = sampling.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= sampling.frequency_penalty * counts[token_id]
        if token_id in counts:
            score -= sampling.presence_penalty
        result.append(score)
    return result


sampling_changes = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 3),
        "logit_bias": st.dictionaries(st.integers(0, 14), st.floats(-100, 100), max_size=4),
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 14), max_size=3),
        "bad_words": st.lists(
            st.builds(BadWord, token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=3)),
            max_size=4,
        ),
    },
)
histories = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 11)), max_size=6)


@given(st.lists(st.tuples(histories, histories, sampling_changes), min_size=1, max_size=4))
def test_changes_are_as_defined(rows: list[tuple[list[int], list[int], dict[str, Any]]]) -> None:
    requests = [make_request([0, *prompt], output, **changes) for prompt, output, changes in rows]
    logits = make_logits(len(rows), vocab_size=12)  # fewer than the ids above: some have no logit
    before = logits.clone()
    adjusted = adjust_logits(logits, requests, EOS)
    for row, request in enumerate(requests):
        expected = torch.tensor(adjusted_by_hand(logits[row].tolist(), request, EOS))
        torch.testing.assert_close(adjusted[row], expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(logits, before)


def test_nothing_to_change_copies_nothing() -> None:
    logits = make_logits(2)
    assert adjust_logits(logits, [make_request([1], [2])] * 2, EOS) is logits


def test_min_tokens_holds_endings_back_until_reached() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    sampling = {"min_tokens": 2, "stop_token_ids": [3]}
    assert choose(logits, make_request([0], [1], **sampling)) == [1]
    assert choose(logits, make_request([0], [1, 1], **sampling)) == [2]
    assert choose(logits, make_request([0], [1], **sampling, ignore_eos=True)) == [2]
    assert choose(logits, make_request([0], [1], temperature=1.0, seed=1, **sampling)) != [2]


def test_only_allowed_tokens_are_chosen_whatever_the_grammar_allows_besides() -> None:
    logits = make_logits(6, vocab_size=70)
    logits[:, 7] = 50.0  # everybody's favourite
    allowed = [3, 40, 66, 1000]  # 1000 has no logit
    requests = [
        make_request([0], allowed_token_ids=allowed if row % 2 else [], temperature=row // 2)
        for row in range(6)
    ]
    chosen = [token.token_id for token in sample(logits, requests, EOS)]
    assert chosen[::2] == [7, 7, 7]
    assert all(token_id in allowed for token_id in chosen[1::2])
    bits = np.zeros((2, 3), dtype=np.int32)
    bits[0, 0] = 1 << 7 | 1 << 9  # row 2: 7 and 9
    bits[1, 1] = 1 << (40 - 32) | 1 << (41 - 32)  # row 3: 40 and 41
    narrowed = sample(logits, requests, EOS, TokenMasks([2, 3], bits))
    assert [token.token_id for token in narrowed] == [7, chosen[1], 7, 40, 7, chosen[5]]
    requests[3].sampling.allowed_token_ids[:] = [3]
    requests[3].allowed_words = None  # kept from the steps before
    with pytest.raises(NoTokenLeft, match="allowed_token_ids"):
        sample(logits, requests, EOS, TokenMasks([2, 3], bits))


# ---- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_the_model_s_own() -> None:
    logits = make_logits(3)
    plain = torch.log_softmax(logits, dim=-1)
    sampling = {"logit_bias": {5: 100.0}, "temperature": 0.5, "top_k": 3}
    requests = [
        make_request([0], logprobs=4, **sampling),
        make_request([0]),
        make_request([0], logprobs=0),
    ]
    biased, none, bare = sample(logits, requests, EOS)
    assert biased.token_id == 5
    assert biased.logprobs is not None
    assert biased.logprobs.chosen == pytest.approx(plain[0, 5].item(), rel=1e-6)
    top = plain[0].topk(4)
    assert biased.logprobs.top_ids == top.indices.tolist()
    assert biased.logprobs.top_logprobs == pytest.approx(top.values.tolist(), rel=1e-6)
    assert none.logprobs is None
    assert bare.logprobs is not None
    assert bare.logprobs.chosen == pytest.approx(plain[2].max().item(), rel=1e-6)
    assert bare.logprobs.top_ids == []


def test_listed_logprobs_are_of_the_chosen_token_and_those_asked_for() -> None:
    logits = make_logits(1, vocab_size=40)
    plain = torch.log_softmax(logits, dim=-1)[0].tolist()
    requests = [make_request([0], logprobs=2, logprob_token_ids=[9, 5, 9, 1000])]
    (token,) = sample(logits, requests, EOS)
    (by_torch,) = sample_by_torch(logits, requests, EOS)
    assert token.logprobs is not None
    assert by_torch.logprobs is not None
    assert by_torch.logprobs.top_ids == token.logprobs.top_ids
    assert by_torch.logprobs.top_logprobs == pytest.approx(token.logprobs.top_logprobs)
    assert token.logprobs.top_ids == [token.token_id, 9, 5]
    assert token.logprobs.top_logprobs == pytest.approx([plain[i] for i in token.logprobs.top_ids])
    assert token.logprobs.chosen == token.logprobs.top_logprobs[0]


def test_logprobs_of_equals_lowest_id_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0]])
    (token,) = sample(logits, [make_request([0], logprobs=4)], EOS)
    assert token.logprobs is not None
    assert token.logprobs.top_ids == [1, 4, 0, 2]
    (token,) = sample(logits, [make_request([0], logprobs=20)], EOS)
    assert token.logprobs is not None
    assert token.logprobs.top_ids == [1, 4, 0, 2, 3, 5]
    assert math.isclose(sum(map(math.exp, token.logprobs.top_logprobs)), 1.0, rel_tol=1e-6)


# ---- what must not matter, and what must ---------------------------------------------------------


def mixed_requests(num_rows: int) -> list[Request]:
    """Every combination of parameters that interferes with batching."""
    return [
        make_request(
            range(1 + i % 5),
            range(i % 7),
            request_id=str(i),
            seed=i * 7919,
            temperature=[0.0, 0.3, 1.0, 1.7][i % 4],
            top_k=[0, 1, 40, 10**6][i // 2 % 4],
            top_p=[1.0, 0.9, 0.999, 0.05][i // 3 % 4],
            min_p=[0.0, 0.1][i // 5 % 2],
            repetition_penalty=[1.0, 1.3][i // 2 % 2],
            frequency_penalty=[0.0, 0.4][i // 3 % 2],
            logit_bias={i: 2.0} if i % 3 == 0 else {},
            min_tokens=i % 4,
            logprobs=i % 3 if i % 2 else None,
        )
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("vocab_size", [97, 4099])
def test_a_row_is_the_same_in_any_batch(vocab_size: int) -> None:
    requests = mixed_requests(64)
    logits = make_logits(64, vocab_size)
    logits[::3] /= 50  # flat: large nuclei
    together = sample(logits, requests, EOS)
    alone = [sample(logits[i : i + 1], [r], EOS)[0] for i, r in enumerate(requests)]
    assert together == alone
    order = torch.randperm(64).tolist()
    shuffled = sample(logits[order], [requests[i] for i in order], EOS)
    assert [together[i] for i in order] == shuffled


def test_tokens_follow_from_seed_and_position() -> None:
    logits = make_logits(1)

    def token(seed: int, prompt: int, output: int) -> int:
        request = make_request([0] * prompt, [0] * output, temperature=1.5, seed=seed)
        return choose(logits, request)[0]

    assert token(1, 5, 3) == token(1, 5, 3)
    assert token(1, 5, 3) == token(1, 8, 0), "the position counts, not where the prompt ends"
    assert len({token(seed, 5, 3) for seed in range(20)}) > 10
    assert len({token(1, 5, output) for output in range(20)}) > 10
    assert token(-1, 5, 3) == token(2**64 - 1, 5, 3)
