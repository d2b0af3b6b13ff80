from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "first_kv_head", "model_kv_heads", "first_layer", "model_layers", "is_latent", "windows", "state_bytes", "rounded_to")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    MODEL_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    MODEL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    IS_LATENT_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDED_TO_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    first_kv_head: int
    model_kv_heads: int
    first_layer: int
    model_layers: int
    is_latent: bool
    windows: _containers.RepeatedScalarFieldContainer[int]
    state_bytes: int
    rounded_to: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., first_kv_head: _Optional[int] = ..., model_kv_heads: _Optional[int] = ..., first_layer: _Optional[int] = ..., model_layers: _Optional[int] = ..., is_latent: bool = ..., windows: _Optional[_Iterable[int]] = ..., state_bytes: _Optional[int] = ..., rounded_to: _Optional[str] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "logprobs", "logprob_token_ids", "grammar", "prompt_logprobs", "pooling")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    prompt_logprobs: int
    pooling: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., pooling: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top_logprobs", "rank")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, chosen: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("chosen", "ranks", "top_ids", "top_logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_s", "handoff_s", "handoff_copy_s", "handoff_room_s", "handoff_step_s", "handoff_hops", "decode_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_COPY_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ROOM_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_STEP_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_HOPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_s: float
    handoff_s: float
    handoff_copy_s: float
    handoff_room_s: float
    handoff_step_s: float
    handoff_hops: HandoffHops
    decode_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., handoff_copy_s: _Optional[float] = ..., handoff_room_s: _Optional[float] = ..., handoff_step_s: _Optional[float] = ..., handoff_hops: _Optional[_Union[HandoffHops, _Mapping]] = ..., decode_s: _Optional[float] = ...) -> None: ...

class HandoffHops(_message.Message):
    __slots__ = ("apply_s", "queue_s", "travel_s", "turn_s", "pull_s", "adopt_s")
    APPLY_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TRAVEL_S_FIELD_NUMBER: _ClassVar[int]
    TURN_S_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    ADOPT_S_FIELD_NUMBER: _ClassVar[int]
    apply_s: float
    queue_s: float
    travel_s: float
    turn_s: float
    pull_s: float
    adopt_s: float
    def __init__(self, apply_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., travel_s: _Optional[float] = ..., turn_s: _Optional[float] = ..., pull_s: _Optional[float] = ..., adopt_s: _Optional[float] = ...) -> None: ...

class NodeAddress(_message.Message):
    __slots__ = ("node_id", "incarnation", "session_address", "introduction")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    session_address: str
    introduction: bytes
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., session_address: _Optional[str] = ..., introduction: _Optional[bytes] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("node", "num_tokens")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    node: NodeAddress
    num_tokens: int
    def __init__(self, node: _Optional[_Union[NodeAddress, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("name", "tenant", "priority", "weight", "ttft_s", "tpot_s", "hold_s", "deadline_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    priority: int
    weight: float
    ttft_s: float
    tpot_s: float
    hold_s: float
    deadline_s: float
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., weight: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., hold_s: _Optional[float] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class PrefillLeg(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "cache_salt", "handoff", "prefix_sources", "slo", "siblings", "traceparent", "is_long", "adapter", "adapted_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    IS_LONG_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    cache_salt: str
    handoff: bool
    prefix_sources: _containers.RepeatedCompositeFieldContainer[PrefixSource]
    slo: Slo
    siblings: _containers.RepeatedCompositeFieldContainer[Sibling]
    traceparent: str
    is_long: bool
    adapter: str
    adapted_from: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., handoff: bool = ..., prefix_sources: _Optional[_Iterable[_Union[PrefixSource, _Mapping]]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., siblings: _Optional[_Iterable[_Union[Sibling, _Mapping]]] = ..., traceparent: _Optional[str] = ..., is_long: bool = ..., adapter: _Optional[str] = ..., adapted_from: _Optional[int] = ...) -> None: ...

class Sibling(_message.Message):
    __slots__ = ("request_id", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class DecodeLeg(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "cache_salt", "source", "prefix_sources", "slo", "sibling_of", "output_token_ids", "is_claimable", "traceparent", "flows", "output_logprobs", "takes_over", "is_long", "prediction", "accepted", "refused", "adapter", "adapted_from", "expected_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCES_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SIBLING_OF_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IS_CLAIMABLE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TAKES_OVER_FIELD_NUMBER: _ClassVar[int]
    IS_LONG_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FROM_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    cache_salt: str
    source: NodeAddress
    prefix_sources: _containers.RepeatedCompositeFieldContainer[PrefixSource]
    slo: Slo
    sibling_of: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    is_claimable: bool
    traceparent: str
    flows: bool
    output_logprobs: PromptLogprobs
    takes_over: str
    is_long: bool
    prediction: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    refused: int
    adapter: str
    adapted_from: int
    expected_output: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., source: _Optional[_Union[NodeAddress, _Mapping]] = ..., prefix_sources: _Optional[_Iterable[_Union[PrefixSource, _Mapping]]] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., sibling_of: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., is_claimable: bool = ..., traceparent: _Optional[str] = ..., flows: bool = ..., output_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., takes_over: _Optional[str] = ..., is_long: bool = ..., prediction: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., refused: _Optional[int] = ..., adapter: _Optional[str] = ..., adapted_from: _Optional[int] = ..., expected_output: _Optional[int] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("request_id", "token_ids", "cache_salt", "prefix_sources", "is_long", "adapter", "adapted_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SOURCES_FIELD_NUMBER: _ClassVar[int]
    IS_LONG_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    prefix_sources: _containers.RepeatedCompositeFieldContainer[PrefixSource]
    is_long: bool
    adapter: str
    adapted_from: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., prefix_sources: _Optional[_Iterable[_Union[PrefixSource, _Mapping]]] = ..., is_long: bool = ..., adapter: _Optional[str] = ..., adapted_from: _Optional[int] = ...) -> None: ...

class Prefetched(_message.Message):
    __slots__ = ("request_id", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("request_id", "token_ids", "finish_reason", "stop_token_id", "logprobs", "accepted", "refused", "adapter", "adapted_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: int
    stop_token_id: int
    logprobs: PromptLogprobs
    accepted: int
    refused: int
    adapter: str
    adapted_from: int
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., accepted: _Optional[int] = ..., refused: _Optional[int] = ..., adapter: _Optional[str] = ..., adapted_from: _Optional[int] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("order_id", "path", "digest")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    path: str
    digest: str
    def __init__(self, order_id: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class AdapterLoaded(_message.Message):
    __slots__ = ("order_id", "digest", "num_bytes", "code", "message", "invocation")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    digest: str
    num_bytes: int
    code: str
    message: str
    invocation: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, order_id: _Optional[str] = ..., digest: _Optional[str] = ..., num_bytes: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., invocation: _Optional[_Iterable[int]] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class AdapterReport(_message.Message):
    __slots__ = ("digests", "most")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    most: int
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., most: _Optional[int] = ...) -> None: ...

class CancelLeg(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SetRole(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: int
    def __init__(self, role: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("become",)
    BECOME_FIELD_NUMBER: _ClassVar[int]
    become: str
    def __init__(self, become: _Optional[str] = ...) -> None: ...

class DrainSeen(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("coordinator_id", "incarnation", "protocol")
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    coordinator_id: str
    incarnation: str
    protocol: int
    def __init__(self, coordinator_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class TransportReach(_message.Message):
    __slots__ = ("name", "domain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    domain: str
    def __init__(self, name: _Optional[str] = ..., domain: _Optional[str] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "state", "session_address", "metrics_address", "model_id", "revision", "layout", "num_blocks", "max_model_len", "introduction_key", "prefill_refusal", "transports", "attached_to", "program_version", "protocol", "late_last", "weights", "short_len", "model_name", "may_become", "arithmetic", "place_of", "has_woken", "refused")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_KEY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_TO_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LATE_LAST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SHORT_LEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAY_BECOME_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    PLACE_OF_FIELD_NUMBER: _ClassVar[int]
    HAS_WOKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    role: int
    state: int
    session_address: str
    metrics_address: str
    model_id: str
    revision: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    introduction_key: bytes
    prefill_refusal: str
    transports: _containers.RepeatedCompositeFieldContainer[TransportReach]
    attached_to: _containers.RepeatedScalarFieldContainer[str]
    program_version: str
    protocol: int
    late_last: bool
    weights: str
    short_len: int
    model_name: str
    may_become: _containers.RepeatedScalarFieldContainer[str]
    arithmetic: str
    place_of: str
    has_woken: bool
    refused: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[int] = ..., state: _Optional[int] = ..., session_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., introduction_key: _Optional[bytes] = ..., prefill_refusal: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[TransportReach, _Mapping]]] = ..., attached_to: _Optional[_Iterable[str]] = ..., program_version: _Optional[str] = ..., protocol: _Optional[int] = ..., late_last: bool = ..., weights: _Optional[str] = ..., short_len: _Optional[int] = ..., model_name: _Optional[str] = ..., may_become: _Optional[_Iterable[str]] = ..., arithmetic: _Optional[str] = ..., place_of: _Optional[str] = ..., has_woken: bool = ..., refused: _Optional[str] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("peer", "transport", "reason", "codec")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    peer: str
    transport: str
    reason: str
    codec: str
    def __init__(self, peer: _Optional[str] = ..., transport: _Optional[str] = ..., reason: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class DraftState(_message.Message):
    __slots__ = ("source", "drafted", "accepted", "kv_bytes", "used_kv_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    drafted: int
    accepted: int
    kv_bytes: int
    used_kv_bytes: int
    def __init__(self, source: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., used_kv_bytes: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("state", "role", "loading_progress", "queued_tokens", "running_requests", "waiting_requests", "free_blocks", "cached_blocks", "pinned_blocks", "step_time_s", "prefill_ratio", "decode_ratio", "links", "reason", "num_coordinators", "leader", "sent_at", "loop_lag_s", "certificate_ends_at", "busy_share", "prompt_share", "is_standby", "drafts", "no_drafts", "lacks_memory")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOADING_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATIO_FIELD_NUMBER: _ClassVar[int]
    DECODE_RATIO_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    IS_STANDBY_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LACKS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    state: int
    role: int
    loading_progress: float
    queued_tokens: int
    running_requests: int
    waiting_requests: int
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    step_time_s: float
    prefill_ratio: float
    decode_ratio: float
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    reason: str
    num_coordinators: int
    leader: str
    sent_at: float
    loop_lag_s: float
    certificate_ends_at: float
    busy_share: float
    prompt_share: float
    is_standby: bool
    drafts: _containers.RepeatedCompositeFieldContainer[DraftState]
    no_drafts: str
    lacks_memory: bool
    def __init__(self, state: _Optional[int] = ..., role: _Optional[int] = ..., loading_progress: _Optional[float] = ..., queued_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., step_time_s: _Optional[float] = ..., prefill_ratio: _Optional[float] = ..., decode_ratio: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ..., reason: _Optional[str] = ..., num_coordinators: _Optional[int] = ..., leader: _Optional[str] = ..., sent_at: _Optional[float] = ..., loop_lag_s: _Optional[float] = ..., certificate_ends_at: _Optional[float] = ..., busy_share: _Optional[float] = ..., prompt_share: _Optional[float] = ..., is_standby: bool = ..., drafts: _Optional[_Iterable[_Union[DraftState, _Mapping]]] = ..., no_drafts: _Optional[str] = ..., lacks_memory: bool = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("knot_tokens", "knot_s", "sampled_s", "pair_s", "context_s")
    KNOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOT_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    knot_tokens: _containers.RepeatedScalarFieldContainer[int]
    knot_s: _containers.RepeatedScalarFieldContainer[float]
    sampled_s: float
    pair_s: float
    context_s: float
    def __init__(self, knot_tokens: _Optional[_Iterable[int]] = ..., knot_s: _Optional[_Iterable[float]] = ..., sampled_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., context_s: _Optional[float] = ...) -> None: ...

class TransferCosts(_message.Message):
    __slots__ = ("transport", "fixed_s", "bytes_per_s")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    transport: str
    fixed_s: float
    bytes_per_s: float
    def __init__(self, transport: _Optional[str] = ..., fixed_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class PerfReport(_message.Message):
    __slots__ = ("step", "token_budget", "max_batch_size", "transfers")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    step: StepCosts
    token_budget: int
    max_batch_size: int
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCosts]
    def __init__(self, step: _Optional[_Union[StepCosts, _Mapping]] = ..., token_budget: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., transfers: _Optional[_Iterable[_Union[TransferCosts, _Mapping]]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("tier", "stored", "evicted")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    tier: int
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tier: _Optional[int] = ..., stored: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("request_id", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "cached_tokens", "prompt_logprobs", "embedding", "times", "is_taken_over", "accepted", "refused", "decode_precision_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    IS_TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DECODE_PRECISION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: int
    stop_token_id: int
    cached_tokens: int
    prompt_logprobs: PromptLogprobs
    embedding: bytes
    times: PhaseTimes
    is_taken_over: bool
    accepted: int
    refused: int
    decode_precision_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., embedding: _Optional[bytes] = ..., times: _Optional[_Union[PhaseTimes, _Mapping]] = ..., is_taken_over: bool = ..., accepted: _Optional[int] = ..., refused: _Optional[int] = ..., decode_precision_tokens: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("events", "request_ids", "indices", "token_ids")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TokenEvent]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, events: _Optional[_Iterable[_Union[TokenEvent, _Mapping]]] = ..., request_ids: _Optional[_Iterable[str]] = ..., indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LegFailed(_message.Message):
    __slots__ = ("request_id", "code", "message")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: str
    message: str
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "endpoint", "metadata", "unavailable", "part", "host_id", "codecs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    metadata: bytes
    unavailable: str
    part: int
    host_id: str
    codecs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., metadata: _Optional[bytes] = ..., unavailable: _Optional[str] = ..., part: _Optional[int] = ..., host_id: _Optional[str] = ..., codecs: _Optional[_Iterable[str]] = ...) -> None: ...

class PullerHello(_message.Message):
    __slots__ = ("node_id", "incarnation", "exporter_incarnation", "fingerprint", "layout", "introduction", "protocol")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPORTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    exporter_incarnation: str
    fingerprint: str
    layout: KvLayout
    introduction: bytes
    protocol: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., exporter_incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., introduction: _Optional[bytes] = ..., protocol: _Optional[int] = ...) -> None: ...

class ExporterWelcome(_message.Message):
    __slots__ = ("node_id", "incarnation", "fingerprint", "layout", "num_blocks", "memory", "host_id", "access", "offers", "protocol", "answers_pings")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_PINGS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    memory: str
    host_id: str
    access: bytes
    offers: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    protocol: int
    answers_pings: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., memory: _Optional[str] = ..., host_id: _Optional[str] = ..., access: _Optional[bytes] = ..., offers: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., protocol: _Optional[int] = ..., answers_pings: bool = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("request_id", "subscription_id", "at_end", "num_emitted", "taker")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    AT_END_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    TAKER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    subscription_id: str
    at_end: bool
    num_emitted: int
    taker: str
    def __init__(self, request_id: _Optional[str] = ..., subscription_id: _Optional[str] = ..., at_end: bool = ..., num_emitted: _Optional[int] = ..., taker: _Optional[str] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("subscription_id", "pulled")
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    subscription_id: str
    pulled: bool
    def __init__(self, subscription_id: _Optional[str] = ..., pulled: bool = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("subscription_id",)
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    subscription_id: str
    def __init__(self, subscription_id: _Optional[str] = ...) -> None: ...

class TakeOver(_message.Message):
    __slots__ = ("subscription_id",)
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    subscription_id: str
    def __init__(self, subscription_id: _Optional[str] = ...) -> None: ...

class PrefixQuery(_message.Message):
    __slots__ = ("query_id", "first_block", "hashes")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    first_block: int
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, query_id: _Optional[str] = ..., first_block: _Optional[int] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixAnswer(_message.Message):
    __slots__ = ("query_id", "num_blocks", "ticket")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    num_blocks: int
    ticket: bytes
    def __init__(self, query_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("request_id", "ticket", "is_restart", "subscription_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    IS_RESTART_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ticket: bytes
    is_restart: bool
    subscription_id: str
    def __init__(self, request_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., is_restart: bool = ..., subscription_id: _Optional[str] = ...) -> None: ...

class HandoffRecord(_message.Message):
    __slots__ = ("request_id", "num_tokens", "token_ids", "logprobs", "cached_tokens", "prefill_end_s", "ticket", "subscription_id", "made_s", "written_s", "adapter", "head", "num_by_prefill", "state_ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_S_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    MADE_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_BY_PREFILL_FIELD_NUMBER: _ClassVar[int]
    STATE_TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    cached_tokens: int
    prefill_end_s: float
    ticket: bytes
    subscription_id: str
    made_s: float
    written_s: float
    adapter: str
    head: HeadRow
    num_by_prefill: int
    state_ticket: bytes
    def __init__(self, request_id: _Optional[str] = ..., num_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., prefill_end_s: _Optional[float] = ..., ticket: _Optional[bytes] = ..., subscription_id: _Optional[str] = ..., made_s: _Optional[float] = ..., written_s: _Optional[float] = ..., adapter: _Optional[str] = ..., head: _Optional[_Union[HeadRow, _Mapping]] = ..., num_by_prefill: _Optional[int] = ..., state_ticket: _Optional[bytes] = ...) -> None: ...

class HeadRow(_message.Message):
    __slots__ = ("head", "row")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    head: str
    row: bytes
    def __init__(self, head: _Optional[str] = ..., row: _Optional[bytes] = ...) -> None: ...

class HandoffEnded(_message.Message):
    __slots__ = ("request_id", "code", "message", "subscription_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: str
    message: str
    subscription_id: str
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., subscription_id: _Optional[str] = ...) -> None: ...
