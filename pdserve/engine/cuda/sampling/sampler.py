"""Sampling on a GPU, without a wait before its end.

What it needs of the host goes up with the batch, the kernels choose among the logits as soon as
these are there, and all results come down in one copy. The tokens are those that csrc/sampling
chooses from the same logits. The masks of grammars are computed before the step is launched, since
they go up with it.

Each draw takes memory of the size of a row of logits, several times. A step has as many rows as
requests, but of a request's last prompt token one draw for each answer (128 at most). So more draws
than the memory is planned for (`WorstStep`) are made in rounds, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdserve.engine.cuda.copies.staging import Fetch, Staging
from pdserve.engine.cuda.sampling import launches
from pdserve.engine.cuda.sampling.inputs import SamplingInputs, lay_out
from pdserve.engine.cuda.sampling.results import Results, logprobs_of, packing_of
from pdserve.engine.request import Ahead, Request, SampledToken
from pdserve.engine.sampling.interface import Draws, StepSampling
from pdserve.engine.sampling.limits import none_left, unusable
from pdserve.engine.steps.batch import Cargo
from pdserve.lifecycle import Lifecycle
from pdserve.protocol import Prompt, SamplingParams


class CudaSampler:
    """Implements `sampling.interface.Sampler`."""

    def __init__(self, staging: Staging, vocab_size: int, most_draws: int) -> None:
        """Sample from logits.

        Args:
            staging: that of the logits' stream.
            vocab_size: number of logits in a row.
            most_draws: there is memory for so many at a time.
        """
        self._staging = staging
        self._vocab_size = vocab_size
        self._most_draws = most_draws

    def begin(self, draws: Draws) -> StepSampling:
        """Prepare the sampling of a step whose logits are not computed yet."""
        if len(draws.requests) <= self._most_draws:
            return CudaSampling(draws, self._vocab_size, self._staging)
        parts = split_draws(draws, self._most_draws)
        return SamplingRounds(
            [CudaSampling(part, self._vocab_size, self._staging) for part in parts]
        )

    def warm_up(self, device: torch.device) -> None:
        """Launch every kernel, so that no request waits for a compiler."""
        logits = torch.zeros((1, self._vocab_size), dtype=torch.float32, device=device)
        for sampling in (
            SamplingParams(logprobs=1),
            SamplingParams(logit_bias={0: 1.0}),
            SamplingParams(allowed_token_ids=[0]),
        ):
            request = Request("warm-up", Prompt([0]), sampling, Lifecycle(received_s=0.0))
            step = self.begin(Draws([request], None, None, frozenset()))
            step.launch(logits)
            step.tokens()


class CudaSampling:
    """Implements `sampling.interface.StepSampling`."""

    def __init__(self, draws: Draws, vocab_size: int, staging: Staging) -> None:
        self._draws = draws
        self._staging = staging
        self._inputs, self._kinds = lay_out(draws, vocab_size)  # on the host
        self._packing = packing_of(self._inputs)
        self._fetch: Fetch | None = None
        self.sampled: Tensor | None = None
        self.cargo = Cargo(self._inputs.tensors())

    def launch(self, logits: Tensor) -> None:
        """Keep the logits; nothing is chosen yet."""
        there = self.cargo.arrived
        if there is None:  # the batch went up in parts, without cargo
            there = self._staging.send(self.cargo.tensors)
        memory = torch.empty(self._packing.num_bytes, dtype=torch.uint8, device=logits.device)
        results = Results(*self._packing.views(memory))
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton's launches
            self._launch(logits, self._inputs.moved(there), results)
        self._fetch = self._staging.fetch(memory)
        self.sampled = results.token_ids

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens: one per draw, in order."""
        assert self._fetch is not None, "it was launched"
        results = Results(*self._packing.views(self._fetch.wait()))
        token_ids: list[int] = results.token_ids.numpy().tolist()
        if min(token_ids) < 0:
            self._check(token_ids)
        tokens = [SampledToken(token_id) for token_id in token_ids]
        if self._inputs.ranks is not None:
            requests = self._draws.requests
            for draw, logprobs in logprobs_of(results, self._inputs.ranks, requests):
                tokens[draw] = SampledToken(token_ids[draw], logprobs)
        return tokens

    def _launch(self, logits: Tensor, inputs: SamplingInputs, results: Results) -> None:
        """Launch it all; `inputs` and `results` are on the GPU."""
        rows, params, masks, edits, ranks = inputs
        if masks is None and edits is None:
            launches.choose(logits, rows, params, results.token_ids)
        else:
            changed = launches.change(logits, rows, masks, edits, self._kinds)
            launches.choose(changed, None, params, results.token_ids)
        if ranks is not None:
            launches.rank(logits, rows, ranks, results)

    def _check(self, token_ids: list[int]) -> None:
        """Raise if a token is missing that is needed: behind a draft, which may be wrong, none is.

        The logits themselves may be those of the next step by now.
        """
        changes = self._inputs.masks is not None or self._inputs.edits is not None
        missing = [
            (request, token_id)
            for request, token_id in zip(self._draws.requests, token_ids, strict=True)
            if token_id < 0 and not isinstance(request, Ahead)
        ]
        damaged = [
            request for request, token_id in missing if token_id == launches.DAMAGED or not changes
        ]
        if damaged:
            raise unusable(damaged)
        if missing:
            raise none_left([request for request, _ in missing])


class SamplingRounds:
    """Implements `sampling.interface.StepSampling`: what goes up with the batch is of the first.

    Requests whose token cannot be chosen are named round by round: the others' are in later steps.
    """

    sampled = None  # not all at a time: no step runs ahead of one with so many draws

    def __init__(self, rounds: Sequence[CudaSampling]) -> None:
        self._first, *self._others = rounds
        self._logits: Tensor | None = None
        self.cargo = self._first.cargo

    def launch(self, logits: Tensor) -> None:
        """Keep the logits; nothing is chosen yet."""
        self._logits = logits
        self._first.launch(logits)

    def tokens(self) -> list[SampledToken]:
        """Wait for the tokens: one per draw, in order."""
        assert self._logits is not None, "it was launched"
        tokens = self._first.tokens()
        for each in self._others:
            each.launch(self._logits)
            tokens += each.tokens()
        return tokens


def split_draws(draws: Draws, most: int) -> Iterator[Draws]:
    """Yield the draws in parts of at most `most`, in order."""
    for first in range(0, len(draws.requests), most):
        requests = draws.requests[first : first + most]
        end = first + len(requests)
        rows = list(range(first, end)) if draws.rows is None else draws.rows[first:end]
        masks = None if draws.masks is None else draws.masks.between(first, end)
        yield replace(draws, requests=requests, rows=rows, masks=masks)
