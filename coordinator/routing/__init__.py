"""Decides which nodes a request runs on: predictions, policies, and the books of what was sent."""

from coordinator.routing.loads.books import Booking
from coordinator.routing.placement import Placement
from coordinator.routing.router import NodeOutlook, Router

__all__ = ["Booking", "NodeOutlook", "Placement", "Router"]
