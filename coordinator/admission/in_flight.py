"""The requests on the nodes, and a bound on how many of them one tenant may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordinator.admission.waiting_line import MOST_TIMES_FREE


class InFlight:
    """Request ids by tenant. A request without a tenant counts only in total."""

    def __init__(self, most: int) -> None:
        """`most`: limit on all requests together."""
        self.most = most
        self._tenants: dict[str, str] = {}  # request id |-> tenant
        self._num_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tenants)

    def add(self, request_ids: Iterable[str], tenant: str) -> None:
        """Count requests that have been sent to nodes, or will be without a further decision."""
        for request_id in request_ids:
            if request_id not in self._tenants:
                self._tenants[request_id] = tenant
                self._num_of[tenant] += 1

    def remove(self, request_id: str) -> None:
        """Count a request no more; does nothing if it is not counted."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            self._num_of[tenant] -= 1
            if not self._num_of[tenant]:
                del self._num_of[tenant]

    def has_place(self, num_answers: int, tenant: str) -> bool:
        """Return whether so many more requests may be sent to nodes for this tenant."""
        fits = len(self) + num_answers <= self.most
        return fits and not self.is_at_bound(num_answers, tenant)

    def is_at_bound(self, num_answers: int, tenant: str) -> bool:
        """Return whether the tenant has too many there for so many more.

        The more it has, the more places must be left free for others, as in the waiting line. One
        that has none may take any place, so that every call has its turn.
        """
        num_had = self._num_of[tenant] if tenant else 0
        num_free = max(0, self.most - len(self) - num_answers)
        return num_had > 0 and num_had + num_answers > MOST_TIMES_FREE * num_free
