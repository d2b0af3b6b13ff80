"""Finds where prompts stop matching the prefix cache, and whether that was avoidable.

A block's hash in the prefix cache covers all tokens before it. So a word that changes near the top
of otherwise equal prompts, such as the time of day in a system prompt, causes everything after it
to be computed again, and hit rates do not show why. Here the first blocks of each prompt are also
hashed on their own, without the tokens before them. If the first uncached block is new, but later
blocks were seen at the same positions in earlier prompts, that first block broke the prefix. Text
that changes its length shifts what follows it, usually by less than a block, so shifted positions
are tried too.

Hashes are Python's own and never leave this file; neither do tokens. A hash collision only causes a
wrong count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from mmap import mmap

import msgspec

from pdserve.kv import need
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Prompt
from pdserve.protocol.status import PrefixStatus
from pdserve.shared.clock import Clock

NUM_BLOCKS = 64  # examined at the beginning of each prompt
PLACE_BITS = 18
NUM_PLACES = 1 << PLACE_BITS  # for hashes; a page of their 1 MB is there once one is on it
_PLACE = NUM_PLACES - 1
_REST = (1 << 32) - 1  # kept of a hash, to tell it from others of its place
WINDOW_PROMPTS = 512  # per window; statistics cover up to two windows
MIN_GAP_S = 0.002  # between two examined prompts; examining one takes up to 80 microseconds
PROBED_BLOCKS = 2  # blocks after the broken one that are searched for shifted text


class Break(msgspec.Struct, frozen=True):
    """A block of a prompt that changed before text that earlier prompts had as well."""

    at_token: int  # position where the changed block begins
    num_tokens: int  # tokens after it that could have been cached


@dataclass(slots=True)
class _Window:
    """Statistics of a number of consecutive prompts."""

    num_prompts: int = 0
    num_tokens: int = 0
    lost: dict[int, int] = field(default_factory=dict)  # at_token |-> tokens


class _Recent:
    """Recent hashes. Each has one place, which it leaves to the next one that has the same.

    So what is seen again and again stays, and the rest goes little by little.
    """

    def __init__(self) -> None:
        self._places = memoryview(mmap(-1, 4 * NUM_PLACES)).cast("I")

    def __contains__(self, key: int) -> bool:
        return self._places[key & _PLACE] == key >> PLACE_BITS & _REST

    def count(self, keys: Iterable[int]) -> int:
        """Return how many of these keys are there."""
        places = self._places
        return sum(1 for key in keys if places[key & _PLACE] == key >> PLACE_BITS & _REST)

    def update(self, keys: Iterable[int]) -> None:
        """Add keys."""
        places = self._places
        for key in keys:
            places[key & _PLACE] = key >> PLACE_BITS & _REST


class PrefixStability:
    """Examines prompts once it is known how much of each was cached."""

    def __init__(self) -> None:
        self._seen = _Recent()
        self._window, self._former = _Window(), _Window()
        self._next_s = -inf  # when the next prompt may be examined

    @property
    def unstable_share(self) -> float:
        """Share of recent prompts' tokens that were recomputed only due to changes before them."""
        total = self._window.num_tokens + self._former.num_tokens
        return sum(self._lost().values()) / total if total else 0.0

    @property
    def unstable_token(self) -> int | None:
        """Position of the changing text that costs most tokens; None without any."""
        lost = self._lost()
        return max(lost, key=lambda at_token: lost[at_token]) if lost else None

    def observe(
        self,
        prompt: Prompt,
        block_size: int,
        num_cached: int,
        now_s: float,
    ) -> Break | None:
        """Examine a prefilled prompt of which the first `num_cached` tokens were cached.

        Returns the break that was found. Prompts within MIN_GAP_S of the last one are skipped.
        """
        if now_s < self._next_s:
            return None
        self._next_s = now_s + MIN_GAP_S
        if self._window.num_prompts >= WINDOW_PROMPTS:
            self._former, self._window = self._window, _Window()
        beginning = _Beginning(prompt, block_size)
        found = self._find_break(beginning, need.full_blocks(num_cached, block_size))
        self._seen.update(beginning.hashes)
        self._window.num_prompts += 1
        self._window.num_tokens += prompt.num_tokens
        if found is not None:
            lost = self._window.lost
            lost[found.at_token] = lost.get(found.at_token, 0) + found.num_tokens
        return found

    def _find_break(self, prompt: _Beginning, first_block: int) -> Break | None:
        hashes, seen = prompt.hashes, self._seen
        broken = first_block
        while broken < len(hashes) and hashes[broken] in seen:
            broken += 1  # was cached before: evicted, or on another node
        num_lost = seen.count(hashes[broken + 1 :])
        num_lost = num_lost or self._num_moved(prompt, broken)
        size = prompt.block_size
        return Break(broken * size, num_lost * size) if num_lost else None

    def _num_moved(self, prompt: _Beginning, broken: int) -> int:
        """Count blocks after the broken one that were seen before, shifted by less than a block."""
        for index in range(broken + 1, min(broken + 1 + PROBED_BLOCKS, len(prompt.hashes))):
            around = prompt.hashes_around(index)
            if self._seen.count(around):
                shift = next(i for i, key in enumerate(around) if key in self._seen)
                return self._seen.count(prompt.hashes_from(index, shift + 1 - prompt.block_size))
        return 0

    def _lost(self) -> dict[int, int]:
        lost = dict(self._former.lost)
        for at_token, num_tokens in self._window.lost.items():
            lost[at_token] = lost.get(at_token, 0) + num_tokens
        return lost


class _Beginning:
    """The beginning of a prompt, as hashes of full blocks by content and position (no parent)."""

    def __init__(self, prompt: Prompt, block_size: int) -> None:
        self.block_size = block_size
        self._token_ids = tuple(prompt.token_ids[: NUM_BLOCKS * block_size])
        self._namespace = hash((prompt.root, block_size))
        self.hashes = self.hashes_from(0, 0)

    def hashes_from(self, index: int, shift: int) -> list[int]:
        """Return the hashes from block `index` on, with each block shifted by `shift` tokens."""
        size, token_ids = self.block_size, self._token_ids
        starts = range(index * size + shift, len(token_ids) - size + 1, size)
        return [
            hash(token_ids[start : start + size]) ^ place
            for place, start in enumerate(starts, start=self._namespace + index)
        ]

    def hashes_around(self, index: int) -> list[int]:
        """Return the hashes of block `index` at all shifts of less than a block; earliest first."""
        size, token_ids, place = self.block_size, self._token_ids, self._namespace + index
        starts = range((index - 1) * size + 1, (index + 1) * size)
        return [hash(token_ids[start : start + size]) ^ place for start in starts]


class PrefixWatch:
    """Records prefix cache statistics; must be told about every prefilled prompt."""

    def __init__(self, metrics: CoordinatorMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._stability = PrefixStability()
        self._num_tokens = 0
        self._num_cached = 0

    def prefilled(self, prompt: Prompt, block_size: int, num_cached: int) -> None:
        """Record a prefilled prompt of which the first `num_cached` tokens were cached."""
        metrics, num_tokens = self._metrics, prompt.num_tokens
        self._num_tokens += num_tokens
        self._num_cached += num_cached
        metrics.cached_tokens.inc(num_cached)
        # The last token is always computed, and with it the whole of its block.
        if num_cached < need.full_tokens(num_tokens - 1, block_size):
            metrics.prefix_break.observe(num_cached)
        change = self._stability.observe(prompt, block_size, num_cached, self._clock.now())
        if change is not None:
            metrics.prefix_unstable_position.observe(change.at_token)
            metrics.prefix_unstable_tokens.inc(change.num_tokens)

    def status(self) -> PrefixStatus:
        """Return shares of prompt tokens for GET /status; `unstable_*` are about recent prompts."""
        return PrefixStatus(
            cached_share=self._num_cached / self._num_tokens if self._num_tokens else 0.0,
            unstable_share=self._stability.unstable_share,
            unstable_token=self._stability.unstable_token,
        )
