"""The error that a request ends with when a node has failed its leg.

Clients get its text. What nodes say of requests is for them. What nodes say of each other, or of
themselves, holds names and addresses that are none of their business: it goes to the log.
"""

from __future__ import annotations

from typing import Final

from pdserve.errors import (
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
from pdserve.protocol import LegFailed

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
