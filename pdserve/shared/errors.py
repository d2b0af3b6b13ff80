"""The one error tree of pdserve.

    PdserveError
    ├── ConfigError                  an invalid flag, TOML file or environment
    │   └── CalibrationError         a file that is no calibration, or a question outside its ranges
    ├── ModelError                   a checkpoint that cannot be served
    │   ├── UnknownArchitecture
    │   ├── UnsupportedRope
    │   ├── MissingTensor
    │   ├── MisshapedTensor
    │   ├── AdapterRefused           an adapter that cannot be served with this model
    │   ├── RequestsFailed           a step failed for some of its requests alone
    │   │   ├── UnusableLogits       the model's output for them is no distribution
    │   │   ├── NoTokenLeft          what they ask for leaves no token to choose
    │   │   └── GrammarFailed        their grammars cannot be followed, or take too long
    │   └── TokenizerError
    ├── CapacityError
    │   ├── KvBudgetTooSmall         not even one request of max_model_len fits
    │   ├── OutOfBlocks              the block pool cannot serve an allocation now
    │   ├── BuffersFull              no memory for a request's body now
    │   ├── AdaptersFull             no place for one more adapter now
    │   ├── StoreUnavailable         what a call stores cannot be written to disk
    │   └── Overloaded               refused before any work was done; try later
    │       ├── SloUnreachable       it would miss a promise of its class
    │       └── RateLimited          its tenant has used up its quota for now
    ├── RequestError                 an error of the caller: 4xx
    │   ├── InvalidRequest
    │   ├── Unauthorized             no API key, or an unknown one
    │   ├── PermissionDenied         the key does not permit this
    │   ├── ContextLengthExceeded
    │   ├── RequestQuarantined       nodes fail that compute it
    │   ├── IdempotencyKeyInUse      the call that was made under this key still runs
    │   ├── IdempotencyKeyReused     another call was made under this key
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
    │   ├── TicketInvalid            forged, malformed, expired, or of another exporter
    │   ├── StaleTicket              the blocks were reused before or while they were read
    │   ├── TransferTimeout
    │   ├── TransferCancelled
    │   ├── PeerLost
    │   ├── AccessDenied             no introduction by a coordinator, or no open session
    │   ├── CorruptTransfer          what arrived cannot be decoded, or has other checksums
    │   ├── TransportUnavailable     this process cannot use a transport; says what is missing
    │   └── LayoutMismatch           KV of one layout cannot be converted to the other
    └── ClusterError
        ├── NodeLost                 the node running a leg died
        ├── NoNodeAvailable
        ├── NodeDraining
        ├── NodeSick                 a node cannot compute any more; says why
        ├── NodeIdTaken              another process is attached under a node's id
        ├── AlreadyAttached          a node comes by a second address of a coordinator
        ├── RoleRefused              a node cannot, or must not, change pools
        ├── AdapterNotLoaded         a node lacks the adapter of a request
        ├── StaleIncarnation         a message names an earlier incarnation of a process
        └── MalformedMessage         a peer violated the protocol

Errors cross process boundaries as `(code, message)`; `from_code` gives the class back.
"""

from __future__ import annotations

from collections.abc import Sequence


class PdserveError(Exception):
    """Root of all errors that pdserve raises deliberately."""

    code = "internal_error"

    def __init__(self, message: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # of those to try again; 0: unknown, infinite: hopeless

    @property
    def message(self) -> str:
        """What went wrong and what would be right, for people."""
        return str(self)


class ConfigError(PdserveError):
    """A flag, a TOML value or the environment is invalid; says which, and what would be valid."""

    code = "config_error"


class CalibrationError(ConfigError):
    """A file is no calibration, or what is asked lies outside of what one has measured."""

    code = "calibration_error"


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


class AdapterRefused(ModelError):
    """An adapter that is damaged, of another model, or of a kind that is not served."""

    code = "adapter_refused"


class RequestsFailed(ModelError):
    """A step failed for some of its requests only."""

    code = "requests_failed"

    def __init__(self, message: str, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = list(request_ids)


class UnusableLogits(RequestsFailed):
    """The logits of some requests contain a NaN or an infinity."""

    code = "unusable_logits"


class NoTokenLeft(RequestsFailed):
    """The request's parameters and its grammar together leave no token that can be chosen."""

    code = "no_token_left"


class GrammarFailed(RequestsFailed):
    """A grammar that an answer must match is none, is too much, or has come to a dead end."""

    code = "grammar_failed"


class TokenizerError(ModelError):
    """The checkpoint's tokenizer or chat template is missing or unusable."""

    code = "tokenizer_error"


class CapacityError(PdserveError):
    """Not enough memory or not enough capacity."""

    code = "capacity_error"


class KvBudgetTooSmall(CapacityError):
    """The KV memory budget cannot hold one request of max_model_len."""

    code = "kv_budget_too_small"


class OutOfBlocks(CapacityError):
    """The block pool has fewer free blocks than asked for."""

    code = "out_of_blocks"


class BuffersFull(CapacityError):
    """The memory for the bodies of requests is full; slow senders are ended first."""

    code = "buffers_full"


class AdaptersFull(CapacityError):
    """As many adapters are known, or loaded and in use, as may be."""

    code = "adapters_full"


class StoreUnavailable(CapacityError):
    """What a call stores cannot be written to disk, for instance since that is full."""

    code = "store_unavailable"


class Overloaded(CapacityError):
    """Refused before any work was done."""

    code = "overloaded"


class SloUnreachable(Overloaded):
    """The request is predicted to miss the TTFT or TPOT that its class promises."""

    code = "slo_unreachable"


class RateLimited(Overloaded):
    """The tenant has used up its requests or tokens for now."""

    code = "rate_limit_exceeded"


class RequestError(PdserveError):
    """An error of the caller."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """The request itself is invalid."""


class Unauthorized(RequestError):
    """The request has no API key, or an unknown one."""

    code = "invalid_api_key"


class PermissionDenied(RequestError):
    """The API key is valid but does not permit this."""

    code = "permission_denied"


class ContextLengthExceeded(RequestError):
    """Prompt plus requested output exceed max_model_len."""

    code = "context_length_exceeded"


class RequestQuarantined(RequestError):
    """Nodes have failed while they computed this request, so no further one is tried."""

    code = "request_quarantined"


class IdempotencyKeyInUse(RequestError):
    """The call that was made under this idempotency key is still running."""

    code = "idempotency_key_in_use"


class IdempotencyKeyReused(RequestError):
    """The idempotency key was used for another request before."""

    code = "idempotency_key_reused"


class ModelNotFound(RequestError):
    """The request names a model that this cluster does not serve."""

    code = "model_not_found"


class ResponseNotFound(RequestError):
    """The request names a response that is not stored for its tenant."""

    code = "response_not_found"


class PreviousResponseNotFound(ResponseNotFound):
    """The response that the request continues is not stored for its tenant."""

    code = "previous_response_not_found"


class ConnectionExpired(RequestError):
    """The connection has reached its time limit; the client has to open a new one."""

    code = "websocket_connection_limit_reached"


class ConversationNotFound(RequestError):
    """The request names a conversation that is not stored for its tenant."""

    code = "conversation_not_found"


class ItemNotFound(RequestError):
    """The request names an item, a file or a batch that is not there, or not any more."""

    code = "item_not_found"


class NodeNotFound(RequestError):
    """The request names a node that is not attached."""

    code = "node_not_found"


class RequestEnded(PdserveError):
    """A running request stopped before it was complete."""

    code = "request_ended"


class RequestCancelled(RequestEnded):
    """The client stopped the request."""

    code = "request_cancelled"


class DeadlineExceeded(RequestEnded):
    """A deadline of the request has passed; the message says which."""

    code = "deadline_exceeded"


class TransferError(PdserveError):
    """A pull of KV blocks failed; the content of its destination blocks is undefined."""

    code = "transfer_error"


class TicketInvalid(TransferError):
    """The ticket is forged, malformed, expired, or was made by another exporter."""

    code = "ticket_invalid"


class StaleTicket(TransferError):
    """A block named by the ticket was reused before or while it was read."""

    code = "stale_ticket"


class TransferTimeout(TransferError):
    """The transfer was not complete by its deadline."""

    code = "transfer_timeout"


class TransferCancelled(TransferError):
    """The puller cancelled the transfer."""

    code = "transfer_cancelled"


class PeerLost(TransferError):
    """The other end of a transfer or session is gone."""

    code = "peer_lost"


class AccessDenied(TransferError):
    """The puller has not been introduced by a coordinator, or has no open session."""

    code = "access_denied"


class CorruptTransfer(TransferError):
    """What arrived cannot be decoded, or does not match the checksums of its ticket."""

    code = "corrupt_transfer"


class TransportUnavailable(TransferError):
    """This process cannot use a transport; the message says what is missing."""

    code = "transport_unavailable"


class LayoutMismatch(TransferError):
    """The two nodes' KV layouts or models cannot be reconciled; the message holds both."""

    code = "layout_mismatch"


class ClusterError(PdserveError):
    """The request failed because of the state of the cluster."""

    code = "cluster_error"


class NodeLost(ClusterError):
    """The node that was running a leg of the request is gone."""

    code = "node_lost"


class NoNodeAvailable(ClusterError):
    """No ready node of the needed role is attached."""

    code = "no_node_available"


class NodeDraining(ClusterError):
    """The process finishes its running work and accepts nothing new."""

    code = "node_draining"


class NodeSick(ClusterError):
    """The node cannot compute any more. Its message is the reason in its load reports."""

    code = "node_sick"


class NodeIdTaken(ClusterError):
    """A node cannot attach while another process is attached under its id."""

    code = "node_id_taken"


class AlreadyAttached(ClusterError):
    """A node comes by a second address of a coordinator to which it is attached."""

    code = "already_attached"


class RoleRefused(ClusterError):
    """A node cannot change pools, or its old pool would be empty; the message says which."""

    code = "role_refused"


class AdapterNotLoaded(ClusterError):
    """A request's adapter is not loaded on the node, or is being unloaded."""

    code = "adapter_not_loaded"


class StaleIncarnation(ClusterError):
    """The message names an earlier incarnation of a process."""

    code = "stale_incarnation"


class MalformedMessage(ClusterError):
    """A peer sent a message that is invalid, or not allowed at that point."""

    code = "malformed_message"


def _tree(root: type[PdserveError]) -> list[type[PdserveError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _tree(sub))]


def from_code(code: str, message: str) -> PdserveError:
    """The error that a peer reported as `(code, message)`; PdserveError for unknown codes."""
    for cls in _tree(PdserveError):
        if cls.code == code:
            return cls(message)
    return PdserveError(f"{code}: {message}")
