from pdserve.wire import messages_pb2 as _messages_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullerMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[PullerMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[PullerMessage, _Mapping]]] = ...) -> None: ...

class ExporterMessages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ExporterMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ExporterMessage, _Mapping]]] = ...) -> None: ...

class PullerMessage(_message.Message):
    __slots__ = ("hello", "subscribe", "settle", "renew", "prefix_query", "take_over", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: _messages_pb2.PullerHello
    subscribe: _messages_pb2.Subscribe
    settle: _messages_pb2.Settle
    renew: _messages_pb2.Renew
    prefix_query: _messages_pb2.PrefixQuery
    take_over: _messages_pb2.TakeOver
    ping: _messages_pb2.Ping
    def __init__(self, hello: _Optional[_Union[_messages_pb2.PullerHello, _Mapping]] = ..., subscribe: _Optional[_Union[_messages_pb2.Subscribe, _Mapping]] = ..., settle: _Optional[_Union[_messages_pb2.Settle, _Mapping]] = ..., renew: _Optional[_Union[_messages_pb2.Renew, _Mapping]] = ..., prefix_query: _Optional[_Union[_messages_pb2.PrefixQuery, _Mapping]] = ..., take_over: _Optional[_Union[_messages_pb2.TakeOver, _Mapping]] = ..., ping: _Optional[_Union[_messages_pb2.Ping, _Mapping]] = ...) -> None: ...

class ExporterMessage(_message.Message):
    __slots__ = ("welcome", "announcement", "record", "ended", "prefix_answer", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: _messages_pb2.ExporterWelcome
    announcement: _messages_pb2.Announcement
    record: _messages_pb2.HandoffRecord
    ended: _messages_pb2.HandoffEnded
    prefix_answer: _messages_pb2.PrefixAnswer
    pong: _messages_pb2.Pong
    def __init__(self, welcome: _Optional[_Union[_messages_pb2.ExporterWelcome, _Mapping]] = ..., announcement: _Optional[_Union[_messages_pb2.Announcement, _Mapping]] = ..., record: _Optional[_Union[_messages_pb2.HandoffRecord, _Mapping]] = ..., ended: _Optional[_Union[_messages_pb2.HandoffEnded, _Mapping]] = ..., prefix_answer: _Optional[_Union[_messages_pb2.PrefixAnswer, _Mapping]] = ..., pong: _Optional[_Union[_messages_pb2.Pong, _Mapping]] = ...) -> None: ...
