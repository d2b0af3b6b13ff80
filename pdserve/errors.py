"""The one error tree of pdserve.

    PdserveError
    ├── ConfigError                  a flag, a TOML file or an environment that cannot work
    ├── ModelError                   a checkpoint that cannot be served
    │   ├── UnknownArchitecture
    │   ├── UnsupportedRope
    │   ├── MissingTensor
    │   ├── MisshapedTensor
    │   ├── RequestsFailed           a step failed for some of its requests alone
    │   │   ├── UnusableLogits       the model's output for them is no distribution
    │   │   ├── NoTokenLeft          what they ask for leaves no token to choose
    │   │   └── GrammarFailed        their grammars cannot be followed, or take too long
    │   └── TokenizerError
    ├── CapacityError
    │   ├── KvBudgetTooSmall         not even one request of max_model_len fits
    │   ├── OutOfBlocks              the block pool cannot serve an allocation now
    │   └── Overloaded               refused before any work was done; try later
    │       ├── SloUnreachable       it would miss what its class promises
    │       └── RateLimited          its tenant has used what it may for now
    ├── RequestError                 the caller's fault: 4xx
    │   ├── InvalidRequest
    │   ├── Unauthorized             no API key, or nobody's
    │   ├── PermissionDenied         a key that is not good for this
    │   ├── ContextLengthExceeded
    │   ├── ModelNotFound
    │   ├── ResponseNotFound
    │   │   └── PreviousResponseNotFound
    │   ├── ConversationNotFound
    │   ├── ConnectionExpired
    │   ├── ItemNotFound
    │   └── NodeNotFound
    ├── RequestEnded                 why a running request stopped early
    │   ├── RequestCancelled
    │   └── DeadlineExceeded
    ├── TransferError                a pull of KV blocks that did not succeed
    │   ├── TicketInvalid            forged, garbled, or made for somebody else
    │   ├── StaleTicket              the blocks changed hands before or while they were read
    │   ├── TransferTimeout
    │   ├── TransferCancelled
    │   ├── PeerLost
    │   ├── AccessDenied             the puller did not come through a coordinator and a session
    │   ├── CorruptTransfer          the bytes that arrived are not those that were ticketed
    │   ├── TransportUnavailable     this process cannot use a transport; says what is missing
    │   └── LayoutMismatch           no plan leads from one layout to the other
    └── ClusterError
        ├── NodeLost                 the machine running a leg died
        ├── NoNodeAvailable
        ├── NodeDraining
        ├── RoleRefused              a node cannot, or must not, change pools
        ├── StaleIncarnation         a message names a former life of a process
        └── MalformedMessage         a peer said something that is not in the protocol

Errors cross process borders as `(code, message)`; `from_code` gives the class back.
"""

from __future__ import annotations

from collections.abc import Sequence


class PdserveError(Exception):
    """Root of every error pdserve raises on purpose."""

    code = "internal_error"

    @property
    def message(self) -> str:
        """What went wrong and what would be right, for a person."""
        return str(self)


class ConfigError(PdserveError):
    """A flag, a TOML value or the environment cannot work; names it and what would be right."""

    code = "config_error"


class ModelError(PdserveError):
    """A checkpoint that cannot be served."""

    code = "model_error"


class UnknownArchitecture(ModelError):
    """config.json names an architecture this engine has no decoder for."""

    code = "unknown_architecture"


class UnsupportedRope(ModelError):
    """config.json asks for a rotary embedding variant this engine does not have."""

    code = "unsupported_rope"


class MissingTensor(ModelError):
    """The checkpoint lacks a tensor that the architecture needs."""

    code = "missing_tensor"


class MisshapedTensor(ModelError):
    """A tensor's shape contradicts config.json."""

    code = "misshaped_tensor"


class RequestsFailed(ModelError):
    """A step failed for some of its requests alone."""

    code = "requests_failed"

    def __init__(self, message: str, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = list(request_ids)


class UnusableLogits(RequestsFailed):
    """The model's output for some requests is no distribution: it has a NaN or an infinity."""

    code = "unusable_logits"


class NoTokenLeft(RequestsFailed):
    """Grammar, `min_tokens`, biases and penalties together leave no token that can be chosen."""

    code = "no_token_left"


class GrammarFailed(RequestsFailed):
    """A grammar that an answer must match is none, is too much, or has come to a dead end."""

    code = "grammar_failed"


class TokenizerError(ModelError):
    """The checkpoint's tokenizer or chat template is missing or unusable."""

    code = "tokenizer_error"


class CapacityError(PdserveError):
    """Not enough memory or not enough room."""

    code = "capacity_error"


class KvBudgetTooSmall(CapacityError):
    """The KV memory budget cannot hold one request of max_model_len."""

    code = "kv_budget_too_small"


class OutOfBlocks(CapacityError):
    """The block pool has fewer free blocks than asked for."""

    code = "out_of_blocks"


class Overloaded(CapacityError):
    """Refused before any work was done, because it could not be served in time.

    `retry_after_s` is when that is predicted to be different; 0 when nothing is known about it.
    """

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SloUnreachable(Overloaded):
    """The request's class promises a TTFT or TPOT that is predicted to be missed."""

    code = "slo_unreachable"


class RateLimited(Overloaded):
    """Its tenant has used the requests or tokens that it may for now."""

    code = "rate_limit_exceeded"


class RequestError(PdserveError):
    """The caller's fault."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A request that no server could serve as it stands."""


class Unauthorized(RequestError):
    """No API key came with the request, or nobody's."""

    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The API key is good, but not for this."""

    code = "permission_denied"


class ContextLengthExceeded(RequestError):
    """Prompt plus requested output exceed max_model_len."""

    code = "context_length_exceeded"


class ModelNotFound(RequestError):
    """The request names a model that this cluster does not serve."""

    code = "model_not_found"


class ResponseNotFound(RequestError):
    """The request names a response that is not kept here, or not for its tenant."""

    code = "response_not_found"


class PreviousResponseNotFound(ResponseNotFound):
    """What the request goes on from is not kept here, or not for its tenant."""

    code = "previous_response_not_found"


class ConnectionExpired(RequestError):
    """A client has to open a new connection."""

    code = "websocket_connection_limit_reached"


class ConversationNotFound(RequestError):
    """The request names a conversation that is not kept here, or not for its tenant."""

    code = "conversation_not_found"


class ItemNotFound(RequestError):
    """The request names an item that its conversation does not have."""

    code = "item_not_found"


class NodeNotFound(RequestError):
    """The request names a node that is not attached."""

    code = "node_not_found"


class RequestEnded(PdserveError):
    """A running request stopped before it was complete."""

    code = "request_ended"


class RequestCancelled(RequestEnded):
    """The user stopped the request."""

    code = "request_cancelled"


class DeadlineExceeded(RequestEnded):
    """A named deadline of the request passed."""

    code = "deadline_exceeded"


class TransferError(PdserveError):
    """A pull of KV blocks did not succeed; its destination blocks hold nothing of use."""

    code = "transfer_error"


class TicketInvalid(TransferError):
    """The ticket is forged, garbled, expired, or was made by another exporter."""

    code = "ticket_invalid"


class StaleTicket(TransferError):
    """A block named by the ticket changed hands before or while it was read."""

    code = "stale_ticket"


class TransferTimeout(TransferError):
    """The transfer did not reach its end before its deadline."""

    code = "transfer_timeout"


class TransferCancelled(TransferError):
    """The puller gave the transfer up."""

    code = "transfer_cancelled"


class PeerLost(TransferError):
    """The other end of a transfer or session is gone."""

    code = "peer_lost"


class AccessDenied(TransferError):
    """The puller has no introduction by a coordinator, or no open session."""

    code = "access_denied"


class CorruptTransfer(TransferError):
    """The checksums of what arrived are not those of what was ticketed."""

    code = "corrupt_transfer"


class TransportUnavailable(TransferError):
    """This process cannot use a transport; says what is missing."""

    code = "transport_unavailable"


class LayoutMismatch(TransferError):
    """The two nodes' KV layouts or models cannot be reconciled; the message holds both."""

    code = "layout_mismatch"


class ClusterError(PdserveError):
    """Something about the cluster's membership made the request fail."""

    code = "cluster_error"


class NodeLost(ClusterError):
    """The node that was running a leg of the request is gone."""

    code = "node_lost"


class NoNodeAvailable(ClusterError):
    """No ready node of the needed role is attached."""

    code = "no_node_available"


class NodeDraining(ClusterError):
    """The process finishes what it has and takes nothing new."""

    code = "node_draining"


class RoleRefused(ClusterError):
    """A node cannot work for the other pool, or its own would be empty; says which."""

    code = "role_refused"


class StaleIncarnation(ClusterError):
    """The message names a former life of a process."""

    code = "stale_incarnation"


class MalformedMessage(ClusterError):
    """A peer sent something that the protocol does not allow at that point."""

    code = "malformed_message"


def _tree(root: type[PdserveError]) -> list[type[PdserveError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _tree(sub))]


def from_code(code: str, message: str) -> PdserveError:
    """The error a peer reported as `(code, message)`; unknown codes give a plain PdserveError."""
    for cls in _tree(PdserveError):
        if cls.code == code:
            return cls(message)
    return PdserveError(f"{code}: {message}")
