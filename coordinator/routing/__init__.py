"""Which nodes a request runs on: predictions, policies that choose by them, and the books."""

from coordinator.routing.books import Booking
from coordinator.routing.placement import Placement
from coordinator.routing.router import NodeOutlook, Router

__all__ = ["Booking", "NodeOutlook", "Placement", "Router"]
