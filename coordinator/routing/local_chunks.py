"""Prompts that nodes prefill beside streams: chunks in the streams' steps.

Chunks are as large as the token budget, and the TPOT that a request was promised, allow beside the
streams (Sarathi-Serve); the same is taken to hold for the prompts that are queued there. A batch
that is full leaves next to nothing to prompts, but not for long, since its streams end. So what
counts are the batches to come (`Progress`), and not the one of now.
"""

from __future__ import annotations

import numpy as np

from coordinator.routing.decode_load import Batch, DecodeLoad
from coordinator.routing.fleet import Fleet
from coordinator.routing.forecast import BUCKET_S
from coordinator.routing.slots import Floats, Ints
from coordinator.routing.waiting import STRIDE

LEAST_CHUNK = 16  # tokens: so many a prompt gets that has begun, whatever streams were promised


class LocalChunks:
    """Beside batches of these slots; arrays are shaped as the batches, slots last."""

    def __init__(self, fleet: Fleet, slots: Ints, batch: Batch, tpot_s: float) -> None:
        """`tpot_s` 0: nothing was promised."""
        tables, row = fleet.tables, fleet.row[slots]
        self._fleet = fleet
        self._row = row
        self._ratio = fleet.prefill_ratio[slots]
        self.rows: Ints = np.minimum(batch.requests, tables.max_batch[row] - 1)
        self.context = batch.context
        # What the streams add to a step, besides their tokens.
        beside_s = tables.sampled_s[row] * self.rows + tables.context_s[row] * batch.context
        self._beside_s: Floats = beside_s
        self.chunk = self._largest(tpot_s)
        self.step_s: Floats = self._step_s(self.chunk)  # with a chunk in it
        # What a chunk takes in a step of prompts only; and of that, what a second brings.
        full_s = tables.full_step_s[row] * self._ratio
        self.alone_s: Floats = self.chunk * (full_s / tables.token_budget[row])
        self.speed: Floats = self.alone_s / self.step_s

    def without_s(self, at: tuple[Ints, Ints]) -> Floats:
        """Of steps without a chunk, those at these indices: one for each slot."""
        raw_s = self._fleet.tables.steps_s(self._row, self.rows[at]) + self._beside_s[at]
        seconds: Floats = raw_s * self._ratio
        return seconds

    def _step_s(self, num_tokens: Ints) -> Floats:
        seconds = self._fleet.tables.steps_s(self._row, num_tokens + self.rows)
        seconds += self._beside_s
        seconds *= self._ratio
        return seconds

    def _largest(self, tpot_s: float) -> Ints:
        """Tokens of a prompt in each step."""
        tables, rows = self._fleet.tables, self.rows
        most: Ints = np.maximum(tables.token_budget.take(self._row) - rows, 1)
        if tpot_s == 0:
            return most
        room_s = tpot_s / self._ratio - self._beside_s
        fits = tables.most_tokens(self._row, room_s) - rows
        fits = np.minimum(np.maximum(fits, np.minimum(most, LEAST_CHUNK)), most)
        return np.where(rows > 0, fits, most)


class Progress:
    """How prompts get on at these slots, from now to the forecast's horizon and on."""

    def __init__(
        self, fleet: Fleet, decodes: DecodeLoad, slots: Ints, tpot_s: float, now_s: float
    ) -> None:
        self.slots = slots
        self.chunks = LocalChunks(fleet, slots, decodes.ahead(now_s, slots, STRIDE), tpot_s)
        self._speed = self.chunks.speed
        self._columns = np.arange(len(slots))
        done_s = np.cumsum(self._speed, axis=0)
        done_s *= STRIDE * BUCKET_S
        self._done_before_s = done_s - self._speed * (STRIDE * BUCKET_S)

    def at(self, seconds: Floats) -> tuple[Ints, Ints]:
        """The index of these moments, one for each slot, into arrays of `chunks`."""
        moment = np.minimum(seconds / (STRIDE * BUCKET_S), len(self._speed) - 1).astype(np.int64)
        return moment, self._columns

    def takes_s(self, alone_s: Floats) -> Floats:
        """Seconds until what would take so long alone is done: [..., slots], as `alone_s`."""
        is_past = self._done_before_s <= alone_s[..., None, :]
        moment = np.add.reduce(is_past, axis=-2) - 1
        at = moment, self._columns
        left_s = alone_s - self._done_before_s[at]
        seconds: Floats = moment * (STRIDE * BUCKET_S) + left_s / self._speed[at]
        return seconds
