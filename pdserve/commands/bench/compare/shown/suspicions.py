"""What is wrong with a contestant, in words: where its figures look better than its answers are.

None of this changes a score. A server may fail, stream in bursts or be late without any intent; but
who reads a verdict must know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from pdserve.commands.bench.compare.report import ModeReport

FAST: Final = 0.9  # share of requests whose TPOT was in time: the server is fast once it answers
LATE: Final = 0.5  # of whose TTFT not even so many were
HIDDEN: Final = 0.1  # tokens in time less requests in time: their means hide something
BURST: Final = 3.0  # tokens at once; speculative decoding has two or so
PIECE: Final = 1.5  # tokens per piece, by the server's own count
PADDED: Final = 0.999  # of these, less than one: some pieces are no tokens


def suspicions(mode: ModeReport) -> Iterator[str]:
    """Yield sentences about a mode, without their subject: its name."""
    scores = [row.score for row in mode.rows]
    if not scores:
        return
    lowest = min(mode.rows, key=lambda row: row.rate)
    first = lowest.score
    if first.tpot_attainment >= FAST and first.ttft_attainment < LATE:
        yield (
            f"answers late, and fast then: at {lowest.rate:.3g}/s {first.tpot_attainment:.0%} kept "
            f"the TPOT and {first.ttft_attainment:.0%} the TTFT, so only both together count"
        )
    num_failed, num_sent = sum(s.failed for s in scores), sum(s.sent for s in scores)
    if num_failed:
        errors: Counter[str] = Counter()
        for one in scores:
            errors.update({e: n for e, n in one.errors.items() if not e.startswith("429")})
        ((error, count),) = errors.most_common(1)
        yield (
            f"failed {num_failed} of {num_sent} requests, most with: {error} ({count} times); "
            "their times are in no percentile"
        )
    at_once = max(one.tokens_at_once for one in scores)
    if at_once >= BURST:
        yield (
            f"streams in bursts of about {at_once:.0f} tokens: its TPOT is a mean over tokens that "
            "come together and waits for the next ones, which ITL shows"
        )
    if any(one.tokens_in_time < one.attainment - HIDDEN for one in scores):
        yield (
            "holds tokens back: of requests that were in time by their means, many tokens came "
            "later than a steady stream of the promised pace would have brought them"
        )
    per_piece = max(one.tokens_per_piece for one in scores)
    if per_piece >= PIECE:
        yield (
            f"counts {per_piece:.1f} tokens for each piece that it sends: nobody has checked that "
            "count, and its TPOT rests on it"
        )
    if min(one.tokens_per_piece for one in scores) < PADDED:
        yield (
            "sends more pieces than it counts tokens: some are none, and where a TTFT is that of "
            "such a piece it is no TTFT"
        )
    num_shortened = sum(one.prompts_shortened for one in scores)
    if num_shortened:
        yield (
            f"counts fewer prompt tokens than were sent, in {num_shortened} of {num_sent} "
            "requests: it may have cut these prompts, and saved their work"
        )
