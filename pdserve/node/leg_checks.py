"""Checks a leg that has just arrived: whether this node can run it."""

from __future__ import annotations

from pdserve.errors import ContextLengthExceeded, InvalidRequest, NoNodeAvailable
from pdserve.node.roles import NodeParts
from pdserve.protocol import DecodeLeg, NodeState, PrefillLeg


def check_leg(parts: NodeParts, leg: PrefillLeg | DecodeLeg) -> None:
    """Check that a leg that has just arrived can be started.

    Raises:
        NoNodeAvailable: the node is still loading its model.
        ContextLengthExceeded: the request could outgrow the pool.
        InvalidRequest: its id is in use, or it makes no sense for this model.
    """
    num_tokens, max_model_len = len(leg.token_ids), parts.max_model_len
    if parts.state() is NodeState.LOADING:
        raise NoNodeAvailable("a node is still loading its model: try again shortly")
    known = next((request_id for request_id in leg.request_ids if request_id in parts.legs), None)
    if known is not None:
        raise InvalidRequest(f"the request id {known} is in use: it is running already")
    if not 0 < num_tokens <= max_model_len:
        raise ContextLengthExceeded(
            f"a prompt of {num_tokens} tokens: max_model_len {max_model_len} allows "
            f"1 to {max_model_len}"
        )
    if num_tokens + leg.sampling.max_tokens > max_model_len:
        raise ContextLengthExceeded(
            f"{num_tokens} prompt tokens and max_tokens {leg.sampling.max_tokens} are more than "
            f"max_model_len {max_model_len}"
        )
    if isinstance(leg, PrefillLeg) and leg.siblings and leg.sampling.max_tokens == 0:
        raise InvalidRequest("a request without output cannot have several answers")
    if not 0 <= min(leg.token_ids) <= max(leg.token_ids) < parts.vocab_size:
        raise InvalidRequest(f"token ids must be in 0..{parts.vocab_size - 1}")
