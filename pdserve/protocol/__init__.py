"""What the processes say to each other: small, frozen, typed messages.

    requests.py   what a request asks for
    nodes.py      coordinator <-> node: who a node is, and how it is doing
    costs.py      node -> coordinator: what it can do
    legs.py       coordinator <-> node: the parts of a request, and their tokens
    session.py    node <-> node: handing KV over

The wire form of each is the protobuf message of the same name (`proto/pdserve/wire`); the two are
converted in one place, `pdserve/wire/convert.py`, field by field of the same name.
"""

from pdserve.protocol.costs import (
    PerfReport,
    StepCosts,
    TransferCosts,
)
from pdserve.protocol.legs import (
    CancelLeg,
    DecodeLeg,
    LegFailed,
    PhaseTimes,
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
    DrainSeen,
    KvEvents,
    KvTier,
    LinkState,
    LoadReport,
    NodeAddress,
    NodeHello,
    NodeRole,
    NodeState,
    SetRole,
    Welcome,
)
from pdserve.protocol.requests import (
    FinishReason,
    SamplingParams,
    Slo,
    TokenLogprobs,
)
from pdserve.protocol.session import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    PrefixAnswer,
    PrefixQuery,
    PullerHello,
    Renew,
    Settle,
    Subscribe,
    TransportOffer,
)

__all__ = [
    "Announcement",
    "CancelLeg",
    "DecodeLeg",
    "DrainSeen",
    "ExporterWelcome",
    "FinishReason",
    "HandoffEnded",
    "HandoffRecord",
    "KvEvents",
    "KvTier",
    "LegFailed",
    "LinkState",
    "LoadReport",
    "Message",
    "NodeAddress",
    "NodeHello",
    "NodeRole",
    "NodeState",
    "PerfReport",
    "PhaseTimes",
    "PrefillLeg",
    "PrefixAnswer",
    "PrefixQuery",
    "PrefixSource",
    "PullerHello",
    "Renew",
    "SamplingParams",
    "SetRole",
    "Settle",
    "Sibling",
    "Slo",
    "StepCosts",
    "Subscribe",
    "TokenBatch",
    "TokenEvent",
    "TokenLogprobs",
    "TransferCosts",
    "TransportOffer",
    "Welcome",
]
