"""The messages between processes: small, frozen and typed.

    requests.py   a request: its prompt, sampling parameters and promises
    nodes.py      coordinator <-> node: identity, state and load of a node; what its steps cost
    legs.py       coordinator <-> node: the legs of a request, and their tokens
    adapters.py   coordinator <-> node: which adapters a node has
    scores.py     node -> coordinator: log-probabilities of a prompt
    session.py    node <-> node: handoffs and prefixes
    version.py    which builds understand each other

Each has a protobuf message of the same name with the same fields (`proto/pdserve/wire`). They are
converted in one place, `pdserve/wire/convert.py`. One is JSON for clients instead:

    status.py     coordinator -> anybody: the cluster's status, from `GET /status`
"""

from pdserve.protocol.adapters import (
    AdapterLoaded,
    AdapterReport,
    LoadAdapter,
    UnloadAdapter,
)
from pdserve.protocol.legs import (
    CancelLeg,
    Claim,
    Claimed,
    DecodeLeg,
    HandoffHops,
    LegFailed,
    PhaseTimes,
    Prefetch,
    Prefetched,
    PrefillLeg,
    PrefixSource,
    Sibling,
    TokenBatch,
    TokenEvent,
)
from pdserve.protocol.message import (
    Message,
)
from pdserve.protocol.nodes import (
    DraftState,
    Drain,
    DrainSeen,
    KvEvents,
    KvTier,
    LinkState,
    LoadReport,
    NodeAddress,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
    SetRole,
    Sickness,
    StepCosts,
    TransferCosts,
    TransportReach,
    Welcome,
)
from pdserve.protocol.requests import (
    BadWord,
    FinishReason,
    Prompt,
    SamplingParams,
    Slo,
    TokenLogprobs,
    is_long,
)
from pdserve.protocol.scores import PromptLogprobs
from pdserve.protocol.session import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    HeadRow,
    Ping,
    Pong,
    PrefixAnswer,
    PrefixQuery,
    PullerHello,
    Renew,
    Settle,
    Subscribe,
    TakeOver,
    TransportOffer,
)

__all__ = [
    "AdapterLoaded",
    "AdapterReport",
    "Announcement",
    "BadWord",
    "CancelLeg",
    "Claim",
    "Claimed",
    "DecodeLeg",
    "DraftState",
    "Drain",
    "DrainSeen",
    "ExporterWelcome",
    "FinishReason",
    "HandoffEnded",
    "HandoffHops",
    "HandoffRecord",
    "HeadRow",
    "KvEvents",
    "KvTier",
    "LegFailed",
    "LinkState",
    "LoadAdapter",
    "LoadReport",
    "Message",
    "NodeAddress",
    "NodeHello",
    "NodeRole",
    "NodeState",
    "PerfReport",
    "PhaseTimes",
    "Ping",
    "Pong",
    "Prefetch",
    "Prefetched",
    "PrefillLeg",
    "PrefixAnswer",
    "PrefixQuery",
    "PrefixSource",
    "Prompt",
    "PromptLogprobs",
    "PullerHello",
    "Renew",
    "SamplingParams",
    "SetRole",
    "Settle",
    "Sibling",
    "Sickness",
    "Slo",
    "StepCosts",
    "Subscribe",
    "TakeOver",
    "TokenBatch",
    "TokenEvent",
    "TokenLogprobs",
    "TransferCosts",
    "TransportOffer",
    "TransportReach",
    "UnloadAdapter",
    "Welcome",
    "is_long",
]
