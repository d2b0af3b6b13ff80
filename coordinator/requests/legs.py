"""Makes the legs of a request from its placement, and sends them to the nodes.

When a node has failed a leg, its request ends with an error. Clients get its text. What nodes say
of requests is for them. What nodes say of each other, or of themselves, holds names and addresses
that are none of their business: it goes to the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Member
from coordinator.routing import Placement, Router
from coordinator.routing.flowing import flows_from
from pdserve.protocol import (
    DecodeLeg,
    LegFailed,
    PrefillLeg,
    PromptLogprobs,
    SamplingParams,
    Sibling,
    Slo,
)
from pdserve.shared.errors import (
    ClusterError,
    GrammarFailed,
    NodeLost,
    NoTokenLeft,
    PdserveError,
    RequestEnded,
    RequestError,
    TransferError,
    UnusableLogits,
    from_code,
)


def send_legs(
    request: GenerationRequest,
    placement: Placement,
    slo: Slo,
    router: Router,
    siblings: Sequence[GenerationRequest] = (),
) -> None:
    """Send both legs at once; `slo` is what is left of the promise.

    The prefill leg lists the siblings: the prompt is computed once for all. Their decode legs are
    sent separately (`send_sibling_leg`).
    """
    prefill, decode = placement.prefill, placement.decode
    if prefill is not None:
        leg = _prefill_leg(request, placement, prefill, slo, router)
        others = [Sibling(request_id=s.request_id, seed=s.sampling.seed) for s in siblings]
        prefill.send(structs.replace(leg, siblings=others))
    if decode is not None:
        decode.send(_decode_leg(request, placement, decode, slo, router))


def send_sibling_leg(
    request: GenerationRequest, first_id: str, placement: Placement, slo: Slo, router: Router
) -> None:
    """Send the decode leg of another answer to the prompt of `first_id`.

    It has no prefill leg of its own.
    """
    decode = placement.decode
    if decode is not None:
        leg = _decode_leg(request, placement, decode, slo, router)
        decode.send(structs.replace(leg, sibling_of=first_id))


def send_takeover_leg(
    request: GenerationRequest,
    placement: Placement,
    slo: Slo,
    source: Member,
    takes_over: str,
    router: Router,
) -> None:
    """Send the leg that takes a stream over: it runs at `source`, as the leg `takes_over`."""
    target = placement.decode
    assert target is not None
    leg = _decode_leg(request, placement, target, slo, router)
    address = source.address_for(target)
    target.send(structs.replace(leg, source=address, prefix_sources=[], takes_over=takes_over))


def _prefill_leg(
    request: GenerationRequest, placement: Placement, prefill: Member, slo: Slo, router: Router
) -> PrefillLeg:
    sampling = request.sampling
    if request.output_token_ids:  # token 1 is known, and nothing is to end with it
        sampling = SamplingParams(max_tokens=sampling.max_tokens, ignore_eos=True)
    return PrefillLeg(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=sampling,
        handoff=placement.decode is not None,
        prefix_sources=router.prefix_sources(placement, prefill),
        slo=slo,
        traceparent=request.traceparent,
    )


def _decode_leg(
    request: GenerationRequest, placement: Placement, decode: Member, slo: Slo, router: Router
) -> DecodeLeg:
    prefill, sampling = placement.prefill, request.sampling
    if prefill is not None:  # the node that prefills also scores the prompt
        sampling = structs.replace(sampling, prompt_logprobs=None)
    return DecodeLeg(
        request_id=request.request_id,
        prompt=request.prompt,
        sampling=sampling,
        source=prefill.address_for(decode) if prefill is not None else None,
        prefix_sources=[] if prefill is not None else router.prefix_sources(placement, decode),
        slo=slo,
        output_token_ids=request.output_token_ids,
        is_claimable=request.is_claimable,
        traceparent=request.traceparent,
        flows=router.flowing is not None and flows_from(decode),
        prediction=list(request.prediction),
        accepted=request.num_accepted,
        refused=request.num_refused,
        expected_output=round(placement.usual_tokens),
        output_logprobs=PromptLogprobs.of(scores) if (scores := request.output_logprobs) else None,
    )


_NO_OTHER: Final = "is gone, and no other took the request over in time; send it again"
_ABOUT_THE_REQUEST: Final = (RequestError, RequestEnded, GrammarFailed, NoTokenLeft)
_TEXTS: Final[dict[type[PdserveError], str]] = {
    TransferError: "the request's KV could not be moved from one node to another; send it again",
    ClusterError: "a node could not serve the request; send it again",
    PdserveError: "a node could not serve the request",
}


def lost(has_token_one: bool) -> NodeLost:
    """Return the error for the client if its node is gone and no other takes its request over."""
    what = "generated the answer" if has_token_one else "computed the prompt"
    return NodeLost(f"the node that {what} {_NO_OTHER}")


def is_of_the_request(error: PdserveError) -> bool:
    """Whether a request would fail like this on any node."""
    return isinstance(error, (*_ABOUT_THE_REQUEST, UnusableLogits))


def error_of(failure: LegFailed) -> PdserveError:
    """Return the error for the client, of the same class as the node's."""
    error = from_code(failure.code, failure.message)
    if isinstance(error, _ABOUT_THE_REQUEST):
        return error
    return type(error)(next(text for cls, text in _TEXTS.items() if isinstance(error, cls)))
