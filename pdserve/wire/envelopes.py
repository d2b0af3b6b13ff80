"""The envelopes of both gRPC streams, in both directions: which messages they may contain."""

from pdserve import protocol
from pdserve.wire import coordinator_pb2, session_pb2
from pdserve.wire.convert import Envelope

FROM_NODE = Envelope(
    coordinator_pb2.NodeMessages,
    {
        "hello": protocol.NodeHello,
        "load": protocol.LoadReport,
        "tokens": protocol.TokenBatch,
        "failed": protocol.LegFailed,
        "kv_events": protocol.KvEvents,
        "perf": protocol.PerfReport,
        "prefetched": protocol.Prefetched,
        "claimed": protocol.Claimed,
        "adapter_loaded": protocol.AdapterLoaded,
        "adapters": protocol.AdapterReport,
    },
)
FROM_COORDINATOR = Envelope(
    coordinator_pb2.CoordinatorMessages,
    {
        "welcome": protocol.Welcome,
        "prefill": protocol.PrefillLeg,
        "decode": protocol.DecodeLeg,
        "cancel": protocol.CancelLeg,
        "drain_seen": protocol.DrainSeen,
        "set_role": protocol.SetRole,
        "prefetch": protocol.Prefetch,
        "claim": protocol.Claim,
        "drain": protocol.Drain,
        "load_adapter": protocol.LoadAdapter,
        "unload_adapter": protocol.UnloadAdapter,
    },
)
FROM_PULLER = Envelope(
    session_pb2.PullerMessages,
    {
        "hello": protocol.PullerHello,
        "subscribe": protocol.Subscribe,
        "settle": protocol.Settle,
        "renew": protocol.Renew,
        "prefix_query": protocol.PrefixQuery,
        "take_over": protocol.TakeOver,
        "ping": protocol.Ping,
    },
)
FROM_EXPORTER = Envelope(
    session_pb2.ExporterMessages,
    {
        "welcome": protocol.ExporterWelcome,
        "announcement": protocol.Announcement,
        "record": protocol.HandoffRecord,
        "ended": protocol.HandoffEnded,
        "prefix_answer": protocol.PrefixAnswer,
        "pong": protocol.Pong,
    },
)
