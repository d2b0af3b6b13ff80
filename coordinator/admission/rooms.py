"""How much room a promise leaves for others' work, and how much of it that work takes.

room of a promise = the promise less what the request takes when nothing else is there
use of that room  = what others are predicted to add, times a factor that is learned
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.admission.decisions import Predicted, Reason
from coordinator.admission.margin import Margin

# Nodes fill their batches up to 0.9 of a promised TPOT, and let nobody in beyond that (`tpot-cap`),
# so whoever waits for a place there has the last tenth to win it back. More safety than theirs, and
# a margin that follows every bad tenth, would be paid for with requests that would have been kept.
HIGHEST_TPOT_MARGIN = 1.25
TELLING_SHARE = 0.1  # of a promise that others must take before a margin learns from it


@dataclass(frozen=True, slots=True)
class Room:
    """Of one promise; seconds."""

    reason: Reason
    promised_s: float
    idle_s: float
    used_s: float
    room_s: float

    def exceeds(self, share: float) -> bool:
        """Whether more than this share of it is used."""
        return self.used_s > self.room_s * share


class Rooms:
    """Rooms from predictions, and the factors that correct these."""

    def __init__(self) -> None:
        self.ttft_margin = Margin()
        self.tpot_margin = Margin(HIGHEST_TPOT_MARGIN)

    def ttft(self, promised_s: float, predicted: Predicted) -> Room:
        """Of a promised TTFT; infinite: of none."""
        idle_s = predicted.idle_ttft_s
        used_s = self.ttft_margin.factor * max(0.0, predicted.ttft_s - idle_s)
        return Room("ttft", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def tpot(self, promised_s: float, predicted: Predicted) -> Room:
        """Of a TPOT promised to the request, or to others in its batch; infinite: to nobody."""
        idle_s = predicted.idle_tpot_s
        used_s = self.tpot_margin.factor * max(0.0, predicted.tpot_s - idle_s)
        return Room("tpot", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def queue_s(self, predicted: Predicted) -> float:
        """What others add to the TTFT."""
        return self.ttft(inf, predicted).used_s

    def learn_ttft(self, promised_s: float, predicted: Predicted, real_s: float) -> None:
        """A request of which this was predicted had its token 1 after `real_s`."""
        _learn(self.ttft_margin, promised_s, predicted.ttft_s, predicted.idle_ttft_s, real_s)

    def learn_tpot(self, promised_s: float, predicted: Predicted, real_s: float) -> None:
        """A request of which this was predicted had its further tokens `real_s` apart."""
        _learn(self.tpot_margin, promised_s, predicted.tpot_s, predicted.idle_tpot_s, real_s)


def _learn(
    margin: Margin, promised_s: float, predicted_s: float, idle_s: float, real_s: float
) -> None:
    """From a prediction that others had enough of a part in to tell anything about them."""
    if promised_s > 0 and predicted_s - idle_s >= TELLING_SHARE * promised_s:
        margin.learn(predicted_s - idle_s, real_s - idle_s)
