"""What changes a request's logits before a token is chosen, kept between steps.

A request's parameters are converted once, with its first step. Each step then only adds the newest
token, so what a step costs does not grow with the parameters, nor with the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pdserve.protocol import BadWord, SamplingParams

Ids: TypeAlias = npt.NDArray[np.int32]
Amounts: TypeAlias = npt.NDArray[np.float32]
_FEW = 64  # entries that a new list has room for


class RowEdits:
    """The edits of one request. Ids may lie outside of the vocabulary: those have no effect."""

    def __init__(
        self, sampling: SamplingParams, prompt: Sequence[int], eos_token_ids: frozenset[int]
    ) -> None:
        bias = sampling.logit_bias
        self.bias_ids: Ids = np.fromiter(bias, np.int32, len(bias))  # no id twice
        self.bias_amounts: Amounts = np.fromiter(bias.values(), np.float32, len(bias))
        self._bad_words = _BadWords(sampling.bad_words)
        ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else eos_token_ids)
        self._min_tokens = sampling.min_tokens
        self._early = _ids(self._bad_words.always | ends)  # forbidden before `min_tokens`
        self._always = _ids(self._bad_words.always)
        self._frequency, self._presence = sampling.frequency_penalty, sampling.presence_penalty
        self._counts: dict[int, int] = {}  # output token id |-> how often
        self._output = _Growing(has_amounts=True)
        self._repeats = sampling.repetition_penalty != 1.0
        self._seen = _Growing(has_amounts=False)
        if self._repeats:
            self._seen.add_all(prompt)
        self._num_followed = 0  # output tokens
        self._penalises = self._frequency != 0.0 or self._presence != 0.0
        self._follows = self._penalises or self._repeats

    @property
    def seen(self) -> Ids:
        """Tokens of prompt and output, each once; empty without a repetition penalty."""
        return self._seen.ids

    @property
    def output(self) -> tuple[Ids, Amounts]:
        """Tokens of the output, each once, and what is subtracted from their logits; or none."""
        return self._output.ids, self._output.amounts

    def follow(self, output: Sequence[int]) -> None:
        """Take in the output tokens that are new since the last call."""
        begin, self._num_followed = self._num_followed, len(output)
        if not self._follows:
            return
        for token_id in output[begin:]:
            if self._repeats:
                self._seen.set(token_id)
            if self._penalises:
                count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
                self._output.set(token_id, self._frequency * count + self._presence)

    def further(self, output: Sequence[int]) -> RowEdits:
        """Return the edits after this output, which begins with the one that was followed."""
        other = copy(self)
        if self._follows:
            other._counts = dict(self._counts)
            other._output, other._seen = self._output.copy(), self._seen.copy()
            other.follow(output)
        return other

    def forbidden(self, output: Sequence[int]) -> Ids:
        """Return the tokens that may not come next: early ends, and ends of bad words.

        Only the output is searched for the beginning of a bad word, not the prompt, as in vLLM.
        """
        known = self._early if len(output) < self._min_tokens else self._always
        ends = self._bad_words.completed_after(output)
        return np.concatenate([known, _ids(ends)]) if ends else known


class _BadWords:
    """Bad words in a tree of their tokens from the last but one backwards.

    From the end of the output, the tree is followed as far as the output agrees with it.
    """

    def __init__(self, words: Sequence[BadWord]) -> None:
        self.always = {word.token_ids[0] for word in words if len(word.token_ids) == 1}
        self._root: dict[int, Any] = {}  # token id |-> the next node
        self._ends: dict[int, set[int]] = {}  # identity of a node |-> the last tokens of its words
        for word in words:
            *begin, end = word.token_ids
            node = self._root
            for token_id in reversed(begin):
                node = node.setdefault(token_id, {})
            if begin:
                self._ends.setdefault(id(node), set()).add(end)

    def completed_after(self, output: Sequence[int]) -> set[int]:
        """Return the tokens that would complete a bad word."""
        found: set[int] = set()
        node = self._root
        for position in range(len(output) - 1, -1, -1):
            further = node.get(output[position])
            if further is None:
                break
            node = further
            found |= self._ends.get(id(node), set())
        return found


class _Growing:
    """Token ids, each once, and perhaps an amount for each, in arrays with room for more."""

    def __init__(self, *, has_amounts: bool) -> None:
        self._places: dict[int, int] = {}  # token id |-> index
        self._ids = np.empty(_FEW, np.int32)
        self._amounts = np.empty(_FEW if has_amounts else 0, np.float32)

    @property
    def ids(self) -> Ids:
        """The ids: [num_ids]. Valid until the next change."""
        return self._ids[: len(self._places)]

    @property
    def amounts(self) -> Amounts:
        """Their amounts: [num_ids]."""
        return self._amounts[: len(self._places)]

    def copy(self) -> _Growing:
        """Return one that may grow by itself."""
        other = copy(self)
        other._places = dict(self._places)
        other._ids, other._amounts = self._ids.copy(), self._amounts.copy()
        return other

    def add_all(self, token_ids: Sequence[int]) -> None:
        """Add many ids, to an empty list; in order, as neighbours share the cache's lines."""
        distinct = sorted({*token_ids})
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, np.int32)

    def set(self, token_id: int, amount: float = 0.0) -> None:
        """Add an id if it is not there, and set its amount."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.resize(self._ids, 2 * place + _FEW)
            if len(self._amounts):
                self._amounts = np.resize(self._amounts, 2 * place + _FEW)
        self._ids[place] = token_id
        if len(self._amounts):
            self._amounts[place] = amount


def _ids(token_ids: set[int]) -> Ids:
    return np.fromiter(sorted(token_ids), np.int32, len(token_ids))
