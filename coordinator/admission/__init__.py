"""Decides which requests are dispatched, which wait, and which are refused."""

from coordinator.admission.decisions import Admit, Predicted, Refuse, Wait
from coordinator.admission.policy import Admission
from coordinator.admission.waiting_line import WaitingLine

__all__ = ["Admission", "Admit", "Predicted", "Refuse", "Wait", "WaitingLine"]
