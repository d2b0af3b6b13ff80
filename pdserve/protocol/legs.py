"""The legs of a request, between coordinators and nodes.

A request runs as a prefill leg on one node and a decode leg on another, or as one decode leg whose
node computes the prompt itself. Both legs have the same id. A request that is interrupted and sent
again gets another one, so nothing that is still under way for the former can be taken for its own:
`REQUEST`, then `REQUEST~1`, `REQUEST~2` ... One that may be made again under its key, perhaps at
another coordinator, has a random life in the ids of its legs, for the same reason: `REQUEST~LIFE`,
then `REQUEST~LIFE1` ...
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.protocol.message import Message
from pdserve.protocol.nodes import NodeAddress
from pdserve.protocol.requests import FinishReason, Prompt, SamplingParams, Slo, TokenLogprobs
from pdserve.protocol.scores import PromptLogprobs
from pdserve.shared.errors import MalformedMessage

_ATTEMPT = "~"


def leg_id(request_id: str, num_interruptions: int, life: str = "") -> str:
    """Return the id of a request's legs after so many interruptions."""
    attempt = f"{life}{num_interruptions or ''}"
    return f"{request_id}{_ATTEMPT}{attempt}" if attempt else request_id


def request_of_leg(leg_id: str) -> str:
    """Return the id of the request that a leg belongs to."""
    return leg_id.partition(_ATTEMPT)[0]


def is_earlier(leg_id: str, other: str) -> bool:
    """Whether a leg was made before another of the same life of a request; False: also unnamed."""
    return leg_id != "" and (len(leg_id), leg_id) < (len(other), other)


class PrefixSource(Message, frozen=True):
    """A hint, possibly outdated: this node holds the KV of the prompt's first tokens."""

    node: NodeAddress
    num_tokens: int


class Sibling(Message, frozen=True):
    """Another answer to the same prompt: a request of its own that shares the prompt's KV.

    It has the first answer's parameters except for the seed, and no prompt log-probabilities.
    """

    request_id: str
    seed: int


class PrefillLeg(Message, frozen=True):
    """Compute the prompt's KV, sample token 1, and hold the KV until it is pulled.

    With siblings the prompt is still computed once; token 1 and the handoff are made for each of
    them, under its own id.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    handoff: bool = True  # False: the request ends with token 1, or before it; nothing is pulled
    prefix_sources: list[PrefixSource] = []  # longest first; the node decides whether to use them
    slo: Slo = Slo()
    siblings: list[Sibling] = []
    traceparent: str = ""  # W3C trace context of its call; empty: not recorded

    @property
    def request_ids(self) -> list[str]:
        """The ids of all answers to the prompt."""
        return [self.request_id, *(sibling.request_id for sibling in self.siblings)]


class DecodeLeg(Message, frozen=True):
    """Pull the prompt's KV from `source`, then stream tokens from token 2 on.

    Without a `source` the node computes the prompt itself, and streams from token 1 on. If the
    request was interrupted on another node, `output_token_ids` are the tokens that were emitted
    there: their KV is computed along with the prompt's, and the stream goes on after them. With a
    source, too, only their KV is computed here: so where the prompt is for other weights. If it
    still runs at the `source`, as the leg `takes_over`, its KV is pulled while it goes on there. It
    ends there when this node has all complete blocks, and goes on here after its last token there.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    source: NodeAddress | None = None
    prefix_sources: list[PrefixSource] = []  # for a prompt that is computed here
    slo: Slo = Slo()
    sibling_of: str = ""  # request whose prefill leg computes the prompt; empty: this one
    output_token_ids: list[int] = []  # emitted on other nodes; a `source` may know more of them
    is_claimable: bool = False  # if its coordinator is lost, it goes on for a while (`Claim`)
    traceparent: str = ""  # W3C trace context of its call; empty: not recorded
    flows: bool = False  # it moves on before it is late: prompts beside it need not spare it
    output_logprobs: PromptLogprobs | None = None  # of these, if it asks for them and is claimable
    takes_over: str = ""  # see above; empty: nothing
    prediction: list[int] = []  # what its client expects it to say: drafts
    accepted: int = 0  # of the tokens emitted elsewhere: drafts
    refused: int = 0  # drafts there that were wrong
    expected_output: int = 0  # tokens of the whole answer, as such requests have it; 0: unknown

    @property
    def prompt_id(self) -> str:
        """Equal for all requests that share a prefill leg."""
        return self.sibling_of or self.request_id

    @property
    def request_ids(self) -> list[str]:
        """The ids of all answers to the prompt."""
        return [self.request_id]


class Prefetch(Message, frozen=True):
    """Fetch what is worth fetching of the KV of these tokens: a stream is about to move here.

    Answered with `Prefetched`, whatever came of it. A CancelLeg of its id stops it.
    """

    request_id: str
    prompt: Prompt  # with the output so far
    prefix_sources: list[PrefixSource] = []


class Prefetched(Message, frozen=True):
    """A `Prefetch` is over."""

    request_id: str
    num_tokens: int  # fetched; the node may have had others before


class Claim(Message, frozen=True):
    """Ask a node for the stream of a request whose former coordinator is lost.

    Answered with `Claimed`. A stream that is claimed ends on the node: it goes on as a new leg.
    """

    request_id: str


class Claimed(Message, frozen=True):
    """What a node has of a request that was claimed: all its output tokens, none if nothing."""

    request_id: str
    token_ids: list[int] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: PromptLogprobs | None = None  # of all these tokens, if the request asks for them
    accepted: int = 0  # of these tokens: drafts
    refused: int = 0  # drafts that were wrong
    adapter: str = ""  # that has computed them, which its name may stand for no longer
    adapted_from: int = 0  # as in `Prompt`


class CancelLeg(Message, frozen=True):
    """Stop the leg of this id and free its blocks. It is not answered."""

    request_id: str
    reason: str


class HandoffHops(Message, frozen=True):
    """The seconds of each hop of a handoff, one after the other, up to its last one: the next step.

    With `PhaseTimes.handoff_step_s` they add up to `handoff_s`. Between hosts, whose clocks differ,
    a handoff begins with `turn_s`.
    """

    apply_s: float = 0.0  # end of prefill -> its node has applied the step and made the record
    queue_s: float = 0.0  # -> it writes the record to the session
    travel_s: float = 0.0  # -> the decode node reads it
    turn_s: float = 0.0  # -> it begins to pull the last part; includes waiting for room
    pull_s: float = 0.0  # -> all KV is there
    adopt_s: float = 0.0  # -> the engine has the request


class PhaseTimes(Message, frozen=True):
    """Seconds that a request spent in each phase on one node; 0 for phases it did not have."""

    queue_s: float = 0.0  # accepted by the node -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token sampled
    transfer_s: float = 0.0  # copying KV
    handoff_s: float = 0.0  # end of prefill on the other node -> joined the batch here
    handoff_copy_s: float = 0.0  # part of it: copying KV
    handoff_room_s: float = 0.0  # part of it: waiting for room
    handoff_step_s: float = 0.0  # part of it: complete -> joined; the rest is messages
    handoff_hops: HandoffHops | None = None  # all of it, but for that step
    decode_s: float = 0.0  # joined the batch -> last token


class TokenEvent(Message, frozen=True):
    """New tokens of one request; `index` is the output position of the first one, from 0."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended the output
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; sent with token 1
    prompt_logprobs: PromptLogprobs | None = None  # if asked for; sent with token 1
    embedding: bytes = b""  # mean of the pooled states, float32 little-endian; sent at the end
    times: PhaseTimes | None = None  # sent with the node's last event of this request
    is_taken_over: bool = False  # the leg ends with it, and its stream goes on at another node
    accepted: int = 0  # of the tokens, the last: they were drafts
    refused: int = 0  # drafts that were wrong
    # Prompt tokens that the weights of a decode node have computed, since there was no prefill
    # node, where these have others; sent with the first token after it.
    decode_precision_tokens: int = 0


class TokenBatch(Message, frozen=True):
    """The tokens of one engine step for one coordinator.

    Nearly all tokens of a step come without anything else. They are sent in columns of equal
    length, which are cheap to pack and unpack. Only tokens with more to report are events.
    """

    events: list[TokenEvent] = []
    request_ids: list[str] = []  # columns: request i has one more token,
    indices: list[int] = []  # at output position indices[i],
    token_ids: list[int] = []  # which is token_ids[i]

    def check(self) -> None:
        """Raise MalformedMessage if columns differ in length."""
        for event in self.events:
            if event.prompt_logprobs is not None:
                event.prompt_logprobs.check()
        if not len(self.request_ids) == len(self.indices) == len(self.token_ids):
            raise MalformedMessage("TokenBatch: its columns differ in length")

    def each(self) -> Iterator[TokenEvent]:
        """All tokens as events. Raises as `check`, before the first one."""
        self.check()
        yield from self.events
        yield from map(self.plain, range(len(self.token_ids)))

    def plain(self, row: int) -> TokenEvent:
        """Return the token in this row of the columns as an event."""
        return TokenEvent(
            request_id=self.request_ids[row],
            index=self.indices[row],
            token_ids=[self.token_ids[row]],
        )


class LegFailed(Message, frozen=True):
    """A leg failed; its blocks are free again."""

    request_id: str
    code: str
    message: str
