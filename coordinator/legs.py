"""From a request and where it is placed to what the nodes are told."""

from __future__ import annotations

from msgspec import structs

from coordinator.generation import GenerationRequest
from coordinator.registry import Member
from coordinator.routing import Placement, Router
from pdserve.protocol import DecodeLeg, PrefillLeg, Slo


def send_legs(request: GenerationRequest, placement: Placement, slo: Slo, router: Router) -> None:
    """Both at once; `slo` is what is left of what was promised."""
    prefill, decode = placement.prefill, placement.decode
    if prefill is not None:
        prefill.send(_prefill_leg(request, placement, prefill, slo, router))
    if decode is not None:
        decode.send(_decode_leg(request, placement, decode, slo, router))


def _prefill_leg(
    request: GenerationRequest, placement: Placement, prefill: Member, slo: Slo, router: Router
) -> PrefillLeg:
    return PrefillLeg(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        handoff=placement.decode is not None,
        prefix_sources=router.prefix_sources(placement, prefill),
        slo=slo,
    )


def _decode_leg(
    request: GenerationRequest, placement: Placement, decode: Member, slo: Slo, router: Router
) -> DecodeLeg:
    prefill, sampling = placement.prefill, request.sampling
    if prefill is not None:  # who prefills scores the prompt
        sampling = structs.replace(sampling, prompt_logprobs=None)
    return DecodeLeg(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=sampling,
        cache_salt=request.cache_salt,
        source=prefill.address_for(decode) if prefill is not None else None,
        prefix_sources=[] if prefill is not None else router.prefix_sources(placement, decode),
        slo=slo,
    )
