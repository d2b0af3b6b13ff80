"""What happens when a request's token 1 arrives: it is shown to the client, or held back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from coordinator.admission import Admission
from coordinator.nodes.registry import Member
from coordinator.prefixes.stability import PrefixWatch
from coordinator.requests.running import Dispatch, RunningRequest
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import TokenEvent
from pdserve.shared.clock import Clock


class FirstTokens:
    """Records what token 1 says of the prefill, and when the client gets it."""

    def __init__(
        self,
        admission: Admission[RunningRequest],
        prefix_watch: PrefixWatch,
        metrics: CoordinatorMetrics,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._prefix_watch = prefix_watch
        self._metrics = metrics
        self._clock = clock

    def arrived(
        self, event: TokenEvent, running: RunningRequest, dispatch: Dispatch, sender: Member
    ) -> None:
        """Hold token 1 back, or record that it is shown now. Call before it is delivered."""
        request, now_s = running.request, self._clock.now()
        if request.sampling.reuses_prefix and not dispatch.booking.placement.shares_prefill:
            self._prefix_watch.prefilled(
                request.prompt, sender.hello.layout.block_size, event.cached_tokens
            )
        shown = partial(self._shown, running.request_id, dispatch)
        hold_s = dispatch.held_until_s - now_s
        goes_on = event.finish_reason is None and len(event.token_ids) > 0
        if goes_on and hold_s > 0 and dispatch.booking.has_to_wait:
            running.hold(hold_s, partial(self._held, now_s, shown))
        else:
            shown()

    def _held(self, since_s: float, shown: Callable[[], None]) -> None:
        self._metrics.held.observe(self._clock.now() - since_s)
        shown()

    def _shown(self, request_id: str, dispatch: Dispatch) -> None:
        """Record the TTFT: the client gets token 1 now."""
        now_s = self._clock.now()
        self._admission.first_token(request_id, now_s)
        predicted_s = dispatch.booking.placement.ttft_s
        if predicted_s > 0:
            self._metrics.ttft_ratio.observe((now_s - dispatch.at_s) / predicted_s)
