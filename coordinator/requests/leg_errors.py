"""The error that a request ends with when a node has failed its leg.

Clients get its text. What nodes say of requests is for them. What nodes say of each other, or of
themselves, holds names and addresses that are none of their business: it goes to the log.
"""

from __future__ import annotations

from typing import Final

from pdserve.errors import (
    ClusterError,
    GrammarFailed,
    NoTokenLeft,
    PdserveError,
    RequestEnded,
    RequestError,
    TransferError,
    from_code,
)
from pdserve.protocol import LegFailed

LOST_WHILE_PREFILLING: Final = "the node that computed the prompt is gone; send the request again"
LOST_WHILE_DECODING: Final = "the node that generated the answer is gone; send the request again"
_ABOUT_THE_REQUEST: Final = (RequestError, RequestEnded, GrammarFailed, NoTokenLeft)
_TEXTS: Final[dict[type[PdserveError], str]] = {
    TransferError: "the request's KV could not be moved from one node to another; send it again",
    ClusterError: "a node could not serve the request; send it again",
    PdserveError: "a node could not serve the request",
}


def error_of(failure: LegFailed) -> PdserveError:
    """Return the error for the client, of the same class as the node's."""
    error = from_code(failure.code, failure.message)
    if isinstance(error, _ABOUT_THE_REQUEST):
        return error
    return type(error)(next(text for cls, text in _TEXTS.items() if isinstance(error, cls)))
