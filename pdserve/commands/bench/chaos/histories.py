"""Judges what was heard by the same calls undisturbed: histories count, as with Jepsen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from pdserve.commands.bench.chaos.clients import NO_END, HeardStream
from pdserve.shared.errors import ModelNotFound, StoreUnavailable

MOST_SILENT_S: Final = 5.0  # beyond the time in which no node could have gone on
LOST, WRONG, HUNG = "lost", "wrong", "hung"

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Excuses:
    """When a call may fail, if its client is told so."""

    outages: Sequence[Span] = ()  # a pool that calls need had no ready node
    deaths: Sequence[Span] = ()  # of the coordinator, which end the calls that have no key
    full_disks: Sequence[Span] = ()  # nothing could be stored
    no_descriptors: Sequence[Span] = ()  # the coordinator could not let anybody in
    absent: Sequence[Span] = ()  # the adapter that the call names may have been unloaded


def judge(heard: HeardStream, reference: HeardStream, excuses: Excuses) -> list[tuple[str, str]]:
    """Return what is wrong with a call, as (kind, words); nothing if all is well.

    `reference` is the same call undisturbed.
    """
    found: list[tuple[str, str]] = []
    for index, text in heard.answers.items():
        expected = reference.answers.get(index, "")
        if not expected.startswith(text):
            found.append((WRONG, f"choice {index} differs from the undisturbed one"))
    for index, reasons in heard.finish_reasons.items():
        if len(reasons) > 1:
            found.append((WRONG, f"choice {index} has ended {len(reasons)} times"))
    silent_s = longest_silence_s(heard, excuses.outages)
    if silent_s > MOST_SILENT_S or heard.error == NO_END:
        found.append((HUNG, f"nothing came for {silent_s:.1f} s"))
    if _is_excused(heard, excuses):
        return found
    if heard.error:
        found.append((LOST, f"it ended with {heard.error}"))
        return found
    if heard.has_left:
        return found
    if heard.num_ends != 1:
        found.append((WRONG, f"{heard.num_ends} ends of the answer"))
    if not heard.answers and reference.answers:
        found.append((WRONG, f"status {heard.status} and nothing"))
    return found + [
        (WRONG, f"{part} differ from the undisturbed ones")
        for part in ("answers", "finish_reasons", "completion_tokens")
        if getattr(heard, part) != getattr(reference, part)
    ]


def _is_excused(heard: HeardStream, excuses: Excuses) -> bool:
    if heard.error.startswith(StoreUnavailable.code):
        return _overlap(heard, excuses.full_disks)
    if heard.error.startswith(ModelNotFound.code):
        return not heard.answers and _overlap(heard, excuses.absent)
    if heard.status == 503:  # refused: nothing had begun
        return _overlap(heard, excuses.outages)
    if not heard.is_broken or heard.is_keyed:
        return False
    is_shut_out = not heard.heard_s and _overlap(heard, excuses.no_descriptors)
    return is_shut_out or _overlap(heard, excuses.deaths)


def _overlap(heard: HeardStream, outages: Iterable[Span]) -> bool:
    return any(begin <= heard.ended_s and heard.began_s <= end for begin, end in outages)


def longest_silence_s(heard: HeardStream, outages: Iterable[Span]) -> float:
    """Return the longest time without a sound, less what of it was an outage."""
    if len(heard.heard_s) < 2:
        return 0.0  # of a whole answer, only its end is heard
    outages = list(outages)
    return max(
        end - begin - sum(max(0.0, min(end, o[1]) - max(begin, o[0])) for o in outages)
        for begin, end in pairwise(heard.heard_s)
    )


def gap_s(heard: HeardStream, began_s: float, end_s: float) -> float | None:
    """Return the longest gap that a fault may have made; None if nothing was heard then.

    Args:
        heard: of one call.
        began_s: when the fault began.
        end_s: when the next one did, whose gaps are not this one's.
    """
    gaps = [
        end - begin
        for begin, end in pairwise(heard.heard_s)
        if end >= began_s and begin < min(began_s + 1.0, end_s)
    ]
    return max(gaps, default=None)
