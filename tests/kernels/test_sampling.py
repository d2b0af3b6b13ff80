"""Native sampling against torch's, token by token, and the promises about bits."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from pdserve import _native
from pdserve.engine.grammar import TokenMasks
from pdserve.engine.request import Request, SampledToken
from pdserve.engine.sampling.sampler import sample_natively
from pdserve.engine.sampling.torch_sampler import sample_by_torch
from pdserve.shared.errors import NoTokenLeft, RequestsFailed, UnusableLogits
from tests.kernels.cases import EACH_VARIANT, VARIANTS
from tests.kernels.sampling_cases import EOS, FILTERS, SIZES, logits, make_row, rows
from tests.matrix import examples, matrix
from tests.requests import make_request

LARGE = 151_936


Outcome = list[SampledToken] | list[str]


def outcome(sample: Callable[..., list[SampledToken]], *arguments: object) -> Outcome:
    """The tokens, or whose logits are unusable: bias and endings can leave nothing to choose."""
    try:
        return sample(*arguments)
    except RequestsFailed as error:
        return error.request_ids


def natively(logits: Tensor, requests: list[Request], variant: str = "") -> Outcome:
    return outcome(sample_natively, logits, requests, EOS, variant)


def by_torch(logits: Tensor, requests: list[Request]) -> Outcome:
    return outcome(sample_by_torch, logits, requests, EOS)


def with_seeds(request: Request, num: int) -> list[Request]:
    """The same request so many times, but for the seeds."""
    sampling = request.sampling
    return [
        dataclasses.replace(request, sampling=replace(sampling, seed=sampling.seed + 7919 * i))
        for i in range(num)
    ]


@settings(max_examples=examples(50))
@given(row=logits(), requests=rows())
def test_tokens_are_those_of_torch(row: Tensor, requests: list[Request]) -> None:
    """Exactly: both do the same arithmetic."""
    draws = [again for request in requests for again in with_seeds(request, 8)]
    batch = row.repeat(len(draws), 1)
    expected = by_torch(batch, draws)
    for variant in VARIANTS:
        note(variant)
        assert natively(batch, draws, variant) == expected
    assert torch.equal(batch, row.repeat(len(draws), 1)), "logits stay as they are"


@settings(max_examples=examples(50))
@given(row=logits(), requests=rows(with_logprobs=True), data=st.data())
def test_masked_tokens_are_those_of_torch(
    row: Tensor, requests: list[Request], data: st.DataObject
) -> None:
    """Some rows have masks. What they forbid never comes; log-probabilities are as without."""
    batch = row.repeat(len(requests), 1)
    masked = data.draw(st.sets(st.integers(0, len(requests) - 1)))
    masks = make_masks(sorted(masked), len(row), data.draw(st.integers(0, 99)))
    expected = outcome(sample_by_torch, batch, requests, EOS, masks)
    for variant in VARIANTS:
        note(variant)
        found = outcome(sample_natively, batch, requests, EOS, variant, masks)
        assert ids_of(found) == ids_of(expected)
        expect_allowed(found, masks, row)
    assert torch.equal(batch, row.repeat(len(requests), 1)), "logits stay as they are"


def expect_allowed(found: Outcome, masks: TokenMasks, row: Tensor) -> None:
    allowed = masks.allowed(len(row), torch.device("cpu"))
    logprobs = row.double().log_softmax(dim=-1)
    for i, token in enumerate(found):
        if isinstance(token, SampledToken):
            assert i not in masks.rows or allowed[masks.rows.index(i), token.token_id]
            if token.logprobs is not None:
                expected = pytest.approx(logprobs[token.token_id].item(), rel=1e-5, abs=1e-5)
                assert token.logprobs.chosen == expected


def make_masks(rows: list[int], vocab_size: int, seed: int) -> TokenMasks:
    """From few allowed tokens to all of them; bits behind the vocabulary are set at random."""
    generator = np.random.default_rng(seed)
    num_words = -(-vocab_size // 32) + seed % 2
    share = generator.choice([0.02, 0.5, 1.0], size=(len(rows), 1, 1))
    bits = generator.random((len(rows), num_words, 32)) < share
    return TokenMasks(rows, np.packbits(bits, axis=-1, bitorder="little").view(np.int32)[..., 0])


def ids_of(found: Outcome) -> list[int | str]:
    return [token.token_id if isinstance(token, SampledToken) else token for token in found]


@pytest.mark.parametrize("sample", [sample_natively, sample_by_torch])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_error_says_whose_fault_it_is(
    sample: Callable[..., list[SampledToken]], temperature: float
) -> None:
    requests = [
        make_request([0], request_id="masked", temperature=temperature),
        make_request([0], request_id="ends held back", stop_token_ids=range(32), min_tokens=2),
        make_request([3], request_id="overflow", repetition_penalty=1e-300),
        make_request([0], request_id="damaged", temperature=temperature),
        make_request([0], request_id="fine"),
    ]
    logits = make_row(32).repeat(len(requests), 1)
    logits[2, 3] = 1.0
    masks = TokenMasks([0], np.zeros((1, 1), dtype=np.int32))
    with pytest.raises(NoTokenLeft) as theirs:
        _sample_masked(sample, logits, requests, masks)
    assert theirs.value.request_ids == ["masked", "ends held back", "overflow"]
    logits[3, 7] = float("nan")
    with pytest.raises(UnusableLogits, match="are damaged") as ours:
        _sample_masked(sample, logits, requests, masks)
    assert ours.value.request_ids == ["damaged"], "the others are sampled again"


def _sample_masked(
    sample: Callable[..., list[SampledToken]],
    logits: torch.Tensor,
    requests: list[Request],
    masks: TokenMasks,
) -> None:
    arguments = (masks,) if sample is sample_by_torch else ("", masks)
    sample(logits, requests, EOS, *arguments)


@pytest.mark.parametrize("spread", matrix([2.0, 0.0, 0.1, 6.0], 1))
def test_tokens_of_a_large_vocabulary_are_those_of_torch(spread: float) -> None:
    batch = torch.stack([make_row(LARGE, seed=i, spread=spread) for i in range(len(FILTERS))])
    requests = [
        make_request([0], **({"temperature": 1.0, "seed": i} | filters))
        for i, filters in enumerate(FILTERS)
    ]
    expected = by_torch(batch, requests)
    for variant in VARIANTS:
        assert natively(batch, requests, variant) == expected, variant


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_likeliest_token_wherever_it_is(vocab_size: int, variant: str) -> None:
    places = sorted({0, vocab_size // 3, vocab_size // 2, vocab_size - 1})
    batch = make_row(vocab_size).repeat(len(places), 1)
    for i, place in enumerate(places):
        batch[i, place] = 100.0
        batch[i, place + 7 :: 97] = 100.0  # equals behind it
    tokens = sample_natively(batch, [make_request([0])] * len(places), EOS, variant)
    assert [token.token_id for token in tokens] == places


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_one_bad_logit_anywhere_is_found(poison: float, temperature: float, variant: str) -> None:
    places = [0, 1, 15, 16, 500, 1023, 1024, 1098, 1099]
    batch = make_row(1100).repeat(len(places) + 1, 1)
    for i, place in enumerate(places):
        batch[i, place] = poison
    requests = [
        make_request([0], request_id=str(i), temperature=temperature) for i in range(len(batch))
    ]
    assert natively(batch, requests, variant) == [str(i) for i in range(len(places))]


@settings(max_examples=examples(30))
@given(row=logits(), requests=rows(with_logprobs=True))
def test_logprobs_are_those_of_the_model(row: Tensor, requests: list[Request]) -> None:
    expected = row.double().log_softmax(dim=-1)
    ranked = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
    for request, variant in product(requests, VARIANTS):
        note(variant)
        (token,) = natively(row[None], [request], variant)
        if isinstance(token, str):
            continue
        if request.sampling.logprobs is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        assert token.logprobs.top_ids == ranked[: request.sampling.logprobs]
        found = torch.tensor([token.logprobs.chosen, *token.logprobs.top_logprobs])
        wanted = expected[[token.token_id, *token.logprobs.top_ids]].float()
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("num_top", [1, 20, 300])
def test_the_likeliest_of_a_large_vocabulary(num_top: int) -> None:
    row = make_row(LARGE, num_levels=5000)
    (token,) = sample_natively(row[None], [make_request([0], logprobs=num_top)], EOS)
    assert token.logprobs is not None
    order = row.sort(descending=True, stable=True).indices  # equals stay in the order of ids
    assert token.logprobs.top_ids == order[:num_top].tolist()


@settings(max_examples=examples(30))
@given(batch=st.lists(logits(), min_size=1, max_size=5), requests=rows(with_logprobs=True))
def test_a_row_depends_on_itself_alone(batch: list[Tensor], requests: list[Request]) -> None:
    """Not on the rows beside it, on their number, or on who was there before."""
    vocab_size = min(len(row) for row in batch)
    num_rows = min(len(batch), len(requests))
    wide = torch.full((num_rows, vocab_size + 3), float("nan"))
    for i in range(num_rows):
        wide[i, :vocab_size] = batch[i][:vocab_size]
        wide[i, i % vocab_size] = 1.0  # not all of a row impossible
    alone = [natively(wide[i, :vocab_size][None], [requests[i]]) for i in range(num_rows)]
    is_usable = [isinstance(token, SampledToken) for (token,) in alone]
    usable = [request for request, ok in zip(requests, is_usable, strict=False) if ok]
    together = natively(wide[is_usable][:, :vocab_size], usable)
    assert together == [token for token, ok in zip(chain(*alone), is_usable, strict=True) if ok]


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_make_no_difference(num_threads: int) -> None:
    batch = torch.stack([make_row(40_000, seed=i, spread=i / 4) for i in range(18)])
    requests = [
        make_request([0], [3] * i, frequency_penalty=0.1, logprobs=3, seed=i, **filters)
        for i, filters in enumerate({"temperature": 1.0} | f for f in FILTERS * 2)
    ]
    before = _native.num_threads()
    try:
        _native.set_num_threads(1)
        one = sample_natively(batch, requests, EOS)
        _native.set_num_threads(num_threads)
        assert sample_natively(batch, requests, EOS) == one
    finally:
        _native.set_num_threads(before)


def test_variants_agree_on_logprobs_nearly() -> None:
    row = make_row(5000)
    request = make_request([0], logprobs=5, temperature=1.0)
    results = [sample_natively(row[None], [request], EOS, v)[0] for v in VARIANTS]
    assert {token.token_id for token in results} == {results[0].token_id}
    for token in results:
        assert token.logprobs is not None
        assert results[0].logprobs is not None
        assert token.logprobs.chosen == pytest.approx(results[0].logprobs.chosen, rel=1e-6)


@pytest.mark.parametrize("variant", EACH_VARIANT)
@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-38, 1e308])
def test_a_temperature_at_the_limits_of_float(temperature: float, variant: str) -> None:
    """As good as greedy, or as good as uniform: some token in any case."""
    row = make_row(1000)
    tokens, _ = _native.sample(row[None], packed(temperature), [], variant)
    if temperature < 1:
        assert tokens == [int(row.argmax())]
    else:
        assert 0 <= tokens[0] < len(row)


# ---- the launcher --------------------------------------------------------------------------------


def packed(temperature: float = 0.0, top_p: float = 1.0, min_p: float = 0.0) -> bytes:
    return struct.pack("=dddqQQq", temperature, top_p, min_p, 0, 0, 0, -1)


def arguments() -> dict[str, Any]:
    """What works: two greedy rows, one of them with edits, the other with a mask."""
    return {
        "logits": torch.zeros(2, 10),
        "params": packed() * 2,
        "edits": [(1, ids(0), ids(1, 2), amounts(-1, 1), ids(), 1.0, ids(2), amounts(1.5))],
        "masks": np.array([[0b1111110000]], dtype=np.int32),
        "masked_rows": [0],
    }


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def amounts(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def edit(**changes: object) -> list[tuple[object, ...]]:
    fields = ["row", "forbidden", "biased", "biases", "seen", "repetition", "output", "penalties"]
    values = dict(zip(fields, arguments()["edits"][0], strict=True)) | changes
    return [tuple(values.values())]


ERRORS: list[tuple[str, Any, type[Exception], str]] = [
    ("logits", [1.0], TypeError, "logits: expected a CPU tensor, found list"),
    ("logits", torch.zeros(2, 10).bfloat16(), TypeError, "logits: expected dtype float32"),
    ("logits", torch.zeros(10), ValueError, r"logits: expected shape \[num_rows, vocab_size\]"),
    ("logits", torch.zeros(2, 0), ValueError, "logits: expected 1 to 524288 columns, found 0"),
    ("logits", torch.zeros(1, 1).expand(2, 2**19 + 1), ValueError, "logits: .*contiguous last"),
    ("logits", torch.zeros(1, 2**19 + 1).expand(2, -1), ValueError, "found 524289"),
    ("logits", torch.zeros(10, 2).T, ValueError, "logits: expected a contiguous last dimension"),
    ("logits", torch.zeros(3, 10), ValueError, "params: expected 168 bytes, .*, found 112"),
    ("params", packed(), ValueError, "params: expected 112 bytes"),
    ("params", packed() + packed(temperature=-1.0), ValueError, r"params\[1\]: .*temperature"),
    ("params", packed() + packed(temperature=float("inf")), ValueError, "found inf"),
    ("params", packed(top_p=1.1) * 2, ValueError, r"params\[0\]: expected top_p in \[0, 1\]"),
    ("params", packed(top_p=float("nan")) * 2, ValueError, "top_p.*found.*nan"),
    ("params", packed(min_p=1.1) * 2, ValueError, "min_p"),
    ("edits", [1], TypeError, "edits: expected tuples, found int"),
    ("edits", [(1, [])], ValueError, "edits: expected tuples of 8, found 2"),
    ("edits", edit(row=2), ValueError, "edits: expected rows below 2, found 2"),
    ("edits", edit(row=-1), ValueError, "edits: expected rows below 2, found -1"),
    ("edits", edit(forbidden=(1,)), TypeError, "edits: .*forbidden ids.*int32, found tuple"),
    ("edits", edit(biased=np.array([1, 2])), TypeError, "edits: .*biased.*int32, found ndarray"),
    ("edits", edit(biases=np.array([1.0, 2.0])), TypeError, "biases.*float32, found ndarray"),
    ("edits", edit(biases=amounts(1)), ValueError, "edits: expected 2 biases, found 1"),
    ("edits", edit(seen=ids(1, 2, 3)[::2]), TypeError, "edits: .*seen.*int32, found ndarray"),
    ("edits", edit(output=ids(1, 2)), ValueError, "edits: expected 2 penalties, found 1"),
    ("edits", edit(repetition=None), TypeError, "edits: .*repetition penalty, found NoneType"),
    ("masks", [1], TypeError, "masks: expected a CPU tensor, found list"),
    ("masks", np.zeros((1, 1), np.uint32), TypeError, "masks: expected dtype int32"),
    ("masks", np.zeros((2, 1), np.int32), ValueError, r"masks: .*\[1, 1\], found \[2, 1\]"),
    ("masks", np.zeros((1, 2), np.int32), ValueError, r"masks: .*\[1, 1\], found \[1, 2\]"),
    ("masks", None, ValueError, "masked_rows: expected none without masks, found 1"),
    ("masked_rows", [2], ValueError, "masked_rows: expected rows below 2, found 2"),
    ("masked_rows", [-1], ValueError, "masked_rows: expected rows below 2, found -1"),
    ("masked_rows", ["a"], TypeError, "masked_rows: expected the number of a row, found str"),
    ("variant", "sse9", ValueError, "variant: expected one of .*portable.*, found sse9"),
]  # fmt: skip


def test_the_arguments_work_as_they_are() -> None:
    assert _native.sample(**arguments()) == ([4, 3], [])


@pytest.mark.parametrize(("name", "value", "error", "message"), ERRORS)
def test_sample_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _native.sample(**(arguments() | {name: value}))


def test_without_rows_nothing_is_sampled() -> None:
    assert _native.sample(torch.zeros(0, 10), b"", []) == ([], [])
