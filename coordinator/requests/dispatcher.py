"""Places requests on nodes and sends their legs: the first time, again, and for siblings."""

from __future__ import annotations

from time import perf_counter

from coordinator.admission import Admission
from coordinator.admission.promises import left_of
from coordinator.generation import GenerationRequest
from coordinator.prefixes.hashes import PromptHashes
from coordinator.requests.legs import send_legs, send_sibling_leg
from coordinator.requests.running import Dispatch, RunningRequest
from coordinator.routing import Placement, Router
from pdserve.clock import Clock
from pdserve.errors import NoNodeAvailable
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Slo

MAX_ATTEMPTS = 2  # dispatches of a request whose node is lost before it has sent anything


class Dispatcher:
    """Sends requests to nodes, and enters them in the books of routing and admission."""

    def __init__(
        self,
        router: Router,
        admission: Admission[RunningRequest],
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        self._router = router
        self._admission = admission
        self._metrics = metrics
        self._clock = clock

    def place(self, request: GenerationRequest, prompt: PromptHashes) -> Placement:
        """Return where the request would go now. Raises NoNodeAvailable."""
        started_s = perf_counter()
        placement = self._router.place_hashed(request, prompt)
        self._metrics.decision.observe(perf_counter() - started_s)
        return placement

    def dispatch(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        """Send the legs of a request; its nodes have to keep the promise `slo`.

        Its siblings are sent with it if the prompt is handed off after its prefill. Otherwise they
        start when token 1 arrives (`follow`).
        """
        request = running.request
        self._book(running, placement, slo)
        is_shared = placement.prefill is not None and not request.ends_with_prompt
        siblings = running.siblings_to_begin
        if not is_shared:
            self._admission.will_follow((s.request.request_id for s in siblings), slo)
            siblings = []
        send_legs(request, placement, slo, self._router, [s.request for s in siblings])
        for sibling in siblings:
            beside = self._router.place_sibling(sibling.request, placement)
            self._book(sibling, beside, slo)
            send_sibling_leg(sibling.request, request.request_id, beside, slo, self._router)

    def follow(self, running: RunningRequest, slo: Slo) -> None:
        """Dispatch a sibling whose prompt has already been computed for the first answer.

        Only the rest of a block is left to prefill. `slo` is the promise that the first answer was
        admitted with; the sibling gets what is left of it now.
        """
        try:
            placement = self.place(running.request, running.prompt)
        except NoNodeAvailable as error:
            running.end(error)
            return
        self.dispatch(running, placement, left_of(slo, running.slo_left(self._clock.now())))

    def dispatch_again(self, running: RunningRequest, lost: Dispatch) -> bool:
        """Dispatch a request again after its node was lost; return whether that was possible.

        Only requests that end with their prompt can be sent again: nothing has been shown to their
        client yet. After MAX_ATTEMPTS lost nodes a request is given up, since it may be the cause
        of the crashes.
        """
        request = running.request
        if not request.ends_with_prompt or running.num_attempts >= MAX_ATTEMPTS:
            return False
        try:
            placement = self.place(request, running.prompt)
        except NoNodeAvailable:
            return False
        now_s = self._clock.now()
        lost.booking.end(by_itself=False)
        self._admission.ended(request.request_id, now_s)
        self.dispatch(running, placement, left_of(lost.slo, running.slo_left(now_s)))
        return True

    def _book(self, running: RunningRequest, placement: Placement, slo: Slo) -> None:
        request, now_s = running.request, self._clock.now()
        running.dispatch = Dispatch(self._router.dispatched(request, placement), now_s, slo)
        running.num_attempts += 1
        self._admission.dispatched(request.request_id, slo, placement, now_s)
        self._metrics.placements.labels(side=placement.side).inc()
