"""What one stream may say next, from all sources, and how often that was right."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from pdserve.engine.drafts.grammars import DraftMasks
from pdserve.engine.drafts.source import Drafter, Source
from pdserve.engine.request import Request

# By how many tokens speak for a draft: the more, the surer.
_MORE: Final = (6, 12)
_FIRST: Final = (0.55, 0.75, 0.9)  # shares of right drafts, before any was tried
_TRUST: Final = 4.0  # drafts for which the share before counts
_KEPT: Final = 0.9  # weight of what was known, with each step that tries drafts
_FORGOTTEN: Final = 0.99  # the same, with each step whose drafts are not worth trying


class Shares:
    """Shares of right drafts by how sure they were, of late."""

    def __init__(self, before: Shares | None = None) -> None:
        """`before`: of others, for what is not known yet."""
        self._before = before
        self._tried = [0.0] * len(_FIRST)
        self._right = [0.0] * len(_FIRST)

    def of(self, sureness: int) -> float:
        """The share of right drafts for which so many tokens spoke."""
        return self._of(_kind(sureness))

    def _of(self, kind: int) -> float:
        before = _FIRST[kind] if self._before is None else self._before._of(kind)
        return (self._right[kind] + _TRUST * before) / (self._tried[kind] + _TRUST)

    def add(self, sureness: int, tried: int, right: int) -> None:
        """Learn from drafts that were compared."""
        kind = _kind(sureness)
        self._tried[kind] = _KEPT * self._tried[kind] + tried
        self._right[kind] = _KEPT * self._right[kind] + right

    def forget(self, sureness: int) -> None:
        """Trust a little less in what is known: nothing is learnt while nothing is tried."""
        kind = _kind(sureness)
        self._tried[kind] *= _FORGOTTEN
        self._right[kind] *= _FORGOTTEN


class SourceCounts:
    """What has come of one source's drafts, on a node."""

    def __init__(self) -> None:
        self.tried = 0  # steps of streams that had some
        self.drafted = 0  # tokens
        self.accepted = 0
        self.wrong = 0  # tries with a wrong one, behind which nothing was compared
        self.shares = Shares()


class Asked:
    """A source, as one stream asks it."""

    __slots__ = ("counts", "ended", "propose", "shares")

    def __init__(self, source: Source, drafter: Drafter, counts: SourceCounts) -> None:
        self.propose = drafter.propose
        self.ended = source.ended
        self.counts = counts
        self.shares = Shares(counts.shares)


class Best(NamedTuple):
    """The drafts that a stream could have."""

    tokens: Sequence[int]
    likely: float  # that one of them is right, if those before it are
    right: float  # how many are expected to be
    mask_s: float  # time of the mask that each of them needs


class Guesses:
    """The drafts of one stream: of each proposal, the one of which most is expected to be right."""

    def __init__(
        self,
        request: Request,
        sources: Iterable[Source],
        counts: dict[str, SourceCounts],
        masks: DraftMasks | None,
    ) -> None:
        """
        Args:
            request: the stream.
            sources: to be asked.
            counts: of each source, by name.
            masks: of grammars; None: a stream that has one has no drafts.
        """
        self._masks = None if request.grammar is None else masks
        is_free = request.grammar is None or masks is not None
        self.asked = [
            Asked(source, drafter, counts[source.name])
            for source in sources
            if is_free and (drafter := source.drafter(request)) is not None
        ]
        self._best: tuple[Sequence[int], float] | None = None  # so far: drafts, how likely
        self._most_right = 0.0  # of these
        self._taken: Asked | None = None  # whose they are
        self._sureness = 0  # of that

    def propose(self, request: Request, most: int) -> Best | None:
        """Return the best of what the sources propose, or None."""
        for asked in self.asked:
            tokens, sureness = asked.propose(request, most)
            if tokens:
                self.found(request, asked, tokens, sureness)
        return self.taken(request)

    def found(self, request: Request, asked: Asked, tokens: Sequence[int], sureness: int) -> None:
        """Weigh what a source proposes against what others did."""
        if self._masks is not None:
            tokens = self._masks.allowed(request, tokens)
        likely, number = asked.shares.of(sureness), len(tokens)
        right = likely * (1 - likely**number) / (1 - likely) if likely < 1 else number
        if right > self._most_right:
            self._best, self._most_right = (tokens, likely), right
            self._taken, self._sureness = asked, sureness

    def taken(self, request: Request) -> Best | None:
        """Take the best of what was found; the next proposals are of another step."""
        best, right, self._best, self._most_right = self._best, self._most_right, None, 0.0
        if best is None:
            return None
        mask_s = 0.0 if self._masks is None else self._masks.mask_s(request)
        return Best(*best, right, mask_s)

    def untried(self) -> None:
        """Note that the last proposal was not worth a try."""
        if self._taken is not None:
            self._taken.shares.forget(self._sureness)

    def compared(self, num_drafts: int, num_right: int) -> None:
        """Note what came of the last proposal: of its first tokens, so many were right."""
        if self._taken is None:
            return
        num_compared, counts = min(num_drafts, num_right + 1), self._taken.counts
        self._taken.shares.add(self._sureness, num_compared, num_right)
        counts.shares.add(self._sureness, num_compared, num_right)
        counts.tried += 1
        counts.wrong += num_right < num_drafts
        counts.drafted += num_drafts
        counts.accepted += num_right

    def ended(self, request: Request) -> None:
        """Tell the sources that their stream is over."""
        for asked in self.asked:
            asked.ended(request)


def _kind(sureness: int) -> int:
    return bisect_right(_MORE, sureness)
