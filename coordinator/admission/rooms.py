"""How much room a promise leaves for the work of other requests, and how much of it they use.

room of a promise = the promised time - the time the request takes on idle nodes
use of that room  = the time that other requests are predicted to add * a learned factor
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.admission.decisions import Predicted, Reason
from coordinator.admission.margin import Margin

# Nodes fill their batches up to 0.9 of a promised TPOT and admit no more (`tpot-cap`), so a request
# that waits for a place can make up for it with the last tenth. A larger margin here, driven by the
# slowest tenth of the requests, would refuse requests whose promise would have been kept.
HIGHEST_TPOT_MARGIN = 1.25
TELLING_SHARE = 0.1  # share of a promise that others must use before a margin learns from it


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one promise, in seconds."""

    reason: Reason
    promised_s: float
    idle_s: float
    used_s: float
    room_s: float

    def exceeds(self, share: float) -> bool:
        """Return whether more than this share of the room is used."""
        return self.used_s > self.room_s * share


class Rooms:
    """Computes rooms from predictions, and learns the factors that correct the predictions."""

    def __init__(self) -> None:
        self.ttft_margin = Margin()
        self.tpot_margin = Margin(HIGHEST_TPOT_MARGIN)

    def ttft(self, promised_s: float, predicted: Predicted) -> Room:
        """Return the room of a promised TTFT; infinite means no promise."""
        idle_s = predicted.idle_ttft_s
        used_s = self.ttft_margin.factor * max(0.0, predicted.ttft_s - idle_s)
        return Room("ttft", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def tpot(self, promised_s: float, predicted: Predicted) -> Room:
        """Return the room of a TPOT promised to the request or to others in its batch.

        Infinite means no promise.
        """
        idle_s = predicted.idle_tpot_s
        used_s = self.tpot_margin.factor * max(0.0, predicted.tpot_s - idle_s)
        return Room("tpot", promised_s, idle_s, used_s, max(0.0, promised_s - idle_s))

    def queue_s(self, predicted: Predicted) -> float:
        """Return the time that other requests add to the TTFT."""
        return self.ttft(inf, predicted).used_s

    def learn_ttft(self, promised_s: float, predicted: Predicted, real_s: float) -> None:
        """Learn from a request with this prediction whose token 1 arrived after `real_s`."""
        _learn(self.ttft_margin, promised_s, predicted.ttft_s, predicted.idle_ttft_s, real_s)

    def learn_tpot(self, promised_s: float, predicted: Predicted, real_s: float) -> None:
        """Learn from a request with this prediction whose TPOT was `real_s`."""
        _learn(self.tpot_margin, promised_s, predicted.tpot_s, predicted.idle_tpot_s, real_s)


def _learn(
    margin: Margin, promised_s: float, predicted_s: float, idle_s: float, real_s: float
) -> None:
    """Update a margin if other requests had a large enough part in the prediction."""
    if promised_s > 0 and predicted_s - idle_s >= TELLING_SHARE * promised_s:
        margin.learn(predicted_s - idle_s, real_s - idle_s)
