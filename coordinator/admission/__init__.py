"""Decides which requests are dispatched, which wait, and which are refused."""

from coordinator.admission.decisions import Admit, PredictedTimes, Refuse, Wait
from coordinator.admission.policy import Admission
from coordinator.admission.waiting_line import WaitingLine

__all__ = ["Admission", "Admit", "PredictedTimes", "Refuse", "Wait", "WaitingLine"]
