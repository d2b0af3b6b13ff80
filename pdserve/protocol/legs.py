"""What coordinators and nodes say about a request's legs.

A request runs as a prefill leg on a prefill node and a decode leg on a decode node, or as one local
leg on a decode node that prefills for itself. Every leg of a request carries the same id.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.errors import MalformedMessage
from pdserve.protocol.message import Message
from pdserve.protocol.nodes import NodeAddress
from pdserve.protocol.requests import FinishReason, SamplingParams, Slo, TokenLogprobs


class PrefixSource(Message, frozen=True):
    """A hint: this node held the KV of the prompt's first tokens a moment ago."""

    node: NodeAddress
    num_tokens: int


class Sibling(Message, frozen=True):
    """Another answer to a prompt: as the first one but for its seed, and its prompt is not scored.

    It is a request of its own in all but the prompt's KV.
    """

    request_id: str
    seed: int


class PrefillLeg(Message, frozen=True):
    """Compute the prompt's KV, sample token 1, hold the KV for whoever pulls it.

    Likewise for its siblings: the prompt is computed once, and what is held and told is held and
    told for each of them by its own id.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    handoff: bool = True  # False: one token is all that is wanted, nobody will pull
    prefix_sources: list[PrefixSource] = []  # longest first; pulling from them is up to the node
    slo: Slo = Slo()
    siblings: list[Sibling] = []

    @property
    def request_ids(self) -> list[str]:
        """Of all answers to the prompt."""
        return [self.request_id, *(sibling.request_id for sibling in self.siblings)]


class DecodeLeg(Message, frozen=True):
    """Pull the prompt's KV from `source`, then stream tokens from number 2 on.

    Without a `source` the node prefills the prompt itself, and streams from number 1.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    source: NodeAddress | None = None
    prefix_sources: list[PrefixSource] = []  # of a prompt to be prefilled here
    slo: Slo = Slo()
    sibling_of: str = ""  # the request whose prefill leg computes the prompt; empty: its own

    @property
    def prompt_id(self) -> str:
        """The same of all requests that one prefill leg computes."""
        return self.sibling_of or self.request_id

    @property
    def request_ids(self) -> list[str]:
        """As a prefill leg's."""
        return [self.request_id]


class CancelLeg(Message, frozen=True):
    """Stop whatever runs under this id, free its blocks, say nothing back."""

    request_id: str
    reason: str


class PhaseTimes(Message, frozen=True):
    """Seconds a request spent in each phase on one node; 0 where the node had no such phase."""

    queue_s: float = 0.0  # accepted by the node -> first scheduled
    prefill_s: float = 0.0  # first scheduled -> first token sampled
    transfer_s: float = 0.0  # KV bytes on their way
    handover_s: float = 0.0  # end of the prefill elsewhere -> joined the batch here
    handover_copy_s: float = 0.0  # of it: copying KV
    handover_room_s: float = 0.0  # of it: waiting for room
    handover_step_s: float = 0.0  # of it: complete -> joined; the rest is messages
    decode_s: float = 0.0  # joined the batch -> last token


class TokenEvent(Message, frozen=True):
    """New tokens of one request. `index` is the output position of the first of them, from 0."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the eos or stop token that ended the sequence
    cached_tokens: int = 0  # prompt tokens found in the prefix cache; with token 1
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt from its second token; with token 1
    embedding: bytes = b""  # the mean of its pooled states: float32, little-endian; at its end
    times: PhaseTimes | None = None  # with the node's last event of this request


class TokenBatch(Message, frozen=True):
    """One engine step's tokens for one coordinator: one message per node per step.

    Nearly all tokens of a step are just tokens. They are in columns of equal length, which cost
    next to nothing to pack and to unpack; only those with more to say are events of their own.
    """

    events: list[TokenEvent] = []
    request_ids: list[str] = []  # each has one more token ...
    indices: list[int] = []  # ... at this output position ...
    token_ids: list[int] = []  # ... which is this one

    def each(self) -> Iterator[TokenEvent]:
        """All of them as events.

        Raises:
            MalformedMessage: the columns are not of equal length; before anything else.
        """
        if not len(self.request_ids) == len(self.indices) == len(self.token_ids):
            raise MalformedMessage("TokenBatch: columns of different lengths")
        yield from self.events
        for request_id, index, token_id in zip(
            self.request_ids, self.indices, self.token_ids, strict=True
        ):
            yield TokenEvent(request_id=request_id, index=index, token_ids=[token_id])


class LegFailed(Message, frozen=True):
    """A leg ended in an error; its blocks are free again."""

    request_id: str
    code: str
    message: str
