"""Changes to individual logits: forbidden tokens, biases, penalties.

Each kind of change is gathered from all requests and then applied at once: a step has one small
tensor operation per kind instead of one per request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.request import Ahead, Request
from pdserve.engine.row_edits import Ids, RowEdits


def edits_of(request: Request, eos_token_ids: frozenset[int]) -> RowEdits:
    """Return what changes the request's logits in this step; made with its first step."""
    if isinstance(request, Ahead):
        return edits_of(request.base, eos_token_ids).further(request.output_token_ids)
    edits = request.edits
    if edits is None:
        edits = RowEdits(request.sampling, request.prompt_token_ids, eos_token_ids)
        request.edits = edits
    edits.follow(request.output_token_ids)
    return edits


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
        changes = edits_of(request, eos_token_ids)
        forbidden.add(row, changes.forbidden(request.output_token_ids), 0.0)
        biases.add(row, changes.bias_ids, changes.bias_amounts)
        repetition.add(row, changes.seen, request.sampling.repetition_penalty)
        output.add(row, *changes.output)
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
        self._ids: list[Ids] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, token_ids: Ids, values: npt.NDArray[np.float32] | float) -> None:
        """Add values for a row. Ids without a logit are ignored: they cannot be sampled anyway."""
        if not len(token_ids):
            return
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
