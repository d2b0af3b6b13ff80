"""Changes to individual logits: forbidden tokens, biases, penalties.

Each kind of change is gathered from all requests and then applied at once: a step has one small
tensor operation per kind instead of one per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.request import Request
from pdserve.engine.sampling.permitted import forbidden_ids


def adjust_logits(
    logits: Tensor, requests: Sequence[Request], eos_token_ids: frozenset[int]
) -> Tensor:
    """Apply `min_tokens`, `bad_words`, `logit_bias` and the three penalties.

    Args:
        logits: [num_requests, vocab_size] float32; not modified.
        requests: one per row.
        eos_token_ids: of the model.

    Returns:
        [num_requests, vocab_size]; `logits` itself if no request changes anything.
    """
    vocab_size = logits.shape[1]
    forbidden, biases = _Edits(vocab_size), _Edits(vocab_size)
    repetition, output = _Edits(vocab_size), _Edits(vocab_size)
    for row, request in enumerate(requests):
        _gather_forbidden(forbidden, row, request, eos_token_ids)
        _gather_biases(biases, row, request)
        _gather_penalties(repetition, output, row, request)
    if not (forbidden or biases or repetition or output):
        return logits
    adjusted = logits.clone()
    if forbidden:
        where, _ = forbidden.tensors(logits.device)
        adjusted[where] = float("-inf")
    if biases:
        where, amounts = biases.tensors(logits.device)
        adjusted[where] += amounts
    if repetition:
        where, factors = repetition.tensors(logits.device)
        scores = adjusted[where]
        adjusted[where] = torch.where(scores > 0, scores / factors, scores * factors)
    if output:
        where, amounts = output.tensors(logits.device)
        adjusted[where] -= amounts
    return adjusted


class _Edits:
    """A sparse map (row, token id) |-> number, without duplicate pairs."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[npt.NDArray[np.int64]] = []
        self._ids: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(
        self, row: int, token_ids: npt.NDArray[np.int64], values: npt.NDArray[Any] | float
    ) -> None:
        """Add values for a row. Ids without a logit are ignored: they cannot be sampled anyway."""
        known = (token_ids >= 0) & (token_ids < self._vocab_size)
        ids = token_ids[known]
        self._rows.append(np.full(len(ids), row))
        self._ids.append(ids)
        self._values.append(np.broadcast_to(values, token_ids.shape)[known].astype(np.float32))

    def tensors(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return ((rows, ids), values), each [num_edits]."""
        rows, ids, values = (
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (self._rows, self._ids, self._values)
        )
        return (rows, ids), values


def _gather_forbidden(
    forbidden: _Edits, row: int, request: Request, eos_token_ids: frozenset[int]
) -> None:
    ids = forbidden_ids(request, eos_token_ids)
    if ids:
        forbidden.add(row, np.array(sorted(ids), dtype=np.int64), 0.0)


def _gather_biases(biases: _Edits, row: int, request: Request) -> None:
    logit_bias = request.sampling.logit_bias
    if logit_bias:
        ids = np.array(list(logit_bias), dtype=np.int64)
        biases.add(row, ids, np.array(list(logit_bias.values()), dtype=np.float64))


def _gather_penalties(repetition: _Edits, output: _Edits, row: int, request: Request) -> None:
    sampling = request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = np.array(request.prompt_token_ids + request.output_token_ids, dtype=np.int64)
        repetition.add(row, np.unique(seen), sampling.repetition_penalty)
    if request.output_token_ids and (sampling.frequency_penalty or sampling.presence_penalty):
        ids, counts = np.unique(
            np.array(request.output_token_ids, dtype=np.int64), return_counts=True
        )
        output.add(row, ids, sampling.frequency_penalty * counts + sampling.presence_penalty)
