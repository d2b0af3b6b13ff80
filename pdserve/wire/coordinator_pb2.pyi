from pdserve.wire import messages_pb2 as _messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Reader(_message.Message):
    __slots__ = ("key_hash",)
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    key_hash: str
    def __init__(self, key_hash: _Optional[str] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("may_read",)
    MAY_READ_FIELD_NUMBER: _ClassVar[int]
    may_read: bool
    def __init__(self, may_read: bool = ...) -> None: ...

class NodeMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[NodeMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[NodeMessage, _Mapping]]] = ...) -> None: ...

class CoordinatorMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[CoordinatorMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[CoordinatorMessage, _Mapping]]] = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("hello", "load", "tokens", "failed", "kv_events", "perf", "prefetched", "claimed", "adapter_loaded", "adapters")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    PERF_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    hello: _messages_pb2.NodeHello
    load: _messages_pb2.LoadReport
    tokens: _messages_pb2.TokenBatch
    failed: _messages_pb2.LegFailed
    kv_events: _messages_pb2.KvEvents
    perf: _messages_pb2.PerfReport
    prefetched: _messages_pb2.Prefetched
    claimed: _messages_pb2.Claimed
    adapter_loaded: _messages_pb2.AdapterLoaded
    adapters: _messages_pb2.AdapterReport
    def __init__(self, hello: _Optional[_Union[_messages_pb2.NodeHello, _Mapping]] = ..., load: _Optional[_Union[_messages_pb2.LoadReport, _Mapping]] = ..., tokens: _Optional[_Union[_messages_pb2.TokenBatch, _Mapping]] = ..., failed: _Optional[_Union[_messages_pb2.LegFailed, _Mapping]] = ..., kv_events: _Optional[_Union[_messages_pb2.KvEvents, _Mapping]] = ..., perf: _Optional[_Union[_messages_pb2.PerfReport, _Mapping]] = ..., prefetched: _Optional[_Union[_messages_pb2.Prefetched, _Mapping]] = ..., claimed: _Optional[_Union[_messages_pb2.Claimed, _Mapping]] = ..., adapter_loaded: _Optional[_Union[_messages_pb2.AdapterLoaded, _Mapping]] = ..., adapters: _Optional[_Union[_messages_pb2.AdapterReport, _Mapping]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "prefill", "decode", "cancel", "drain_seen", "set_role", "prefetch", "claim", "drain", "load_adapter", "unload_adapter")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SEEN_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    welcome: _messages_pb2.Welcome
    prefill: _messages_pb2.PrefillLeg
    decode: _messages_pb2.DecodeLeg
    cancel: _messages_pb2.CancelLeg
    drain_seen: _messages_pb2.DrainSeen
    set_role: _messages_pb2.SetRole
    prefetch: _messages_pb2.Prefetch
    claim: _messages_pb2.Claim
    drain: _messages_pb2.Drain
    load_adapter: _messages_pb2.LoadAdapter
    unload_adapter: _messages_pb2.UnloadAdapter
    def __init__(self, welcome: _Optional[_Union[_messages_pb2.Welcome, _Mapping]] = ..., prefill: _Optional[_Union[_messages_pb2.PrefillLeg, _Mapping]] = ..., decode: _Optional[_Union[_messages_pb2.DecodeLeg, _Mapping]] = ..., cancel: _Optional[_Union[_messages_pb2.CancelLeg, _Mapping]] = ..., drain_seen: _Optional[_Union[_messages_pb2.DrainSeen, _Mapping]] = ..., set_role: _Optional[_Union[_messages_pb2.SetRole, _Mapping]] = ..., prefetch: _Optional[_Union[_messages_pb2.Prefetch, _Mapping]] = ..., claim: _Optional[_Union[_messages_pb2.Claim, _Mapping]] = ..., drain: _Optional[_Union[_messages_pb2.Drain, _Mapping]] = ..., load_adapter: _Optional[_Union[_messages_pb2.LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[_messages_pb2.UnloadAdapter, _Mapping]] = ...) -> None: ...
