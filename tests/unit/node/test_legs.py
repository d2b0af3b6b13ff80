"""What of a step goes into one message, and what does not."""

from __future__ import annotations

from pdserve.engine.request import SampledToken
from pdserve.node.legs import Legs, request_of, token_event
from pdserve.protocol import (
    DecodeLeg,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    TokenBatch,
    TokenEvent,
)
from tests.fakes.outbox import RecordingOutbox


def test_scores_of_prompts_are_messages_of_their_own() -> None:
    legs, link = Legs(), RecordingOutbox()
    for name in ("plain", "scored", "other"):
        legs.open(name, link)
    scores = PromptLogprobs(chosen=[-1.0], ranks=[2])
    events = [
        TokenEvent(request_id="plain", index=0, token_ids=[1]),
        TokenEvent(request_id="scored", index=0, token_ids=[2], prompt_logprobs=scores),
        TokenEvent(request_id="other", index=0, token_ids=[3]),
        TokenEvent(request_id="gone", index=0, token_ids=[4], prompt_logprobs=scores),
    ]
    for event in events:
        legs.add_event(event)
    legs.flush()
    assert link.sent == [TokenBatch(events=[events[1]]), TokenBatch(events=[events[0], events[2]])]


def test_a_leg_brings_what_is_expected_and_events_tell_what_came_of_drafts() -> None:
    leg = DecodeLeg(
        request_id="r",
        prompt=Prompt([1]),
        sampling=SamplingParams(),
        prediction=[7, 8],
        accepted=3,
        refused=2,
    )
    request = request_of(leg, 0.0)
    assert request.prediction == [7, 8]
    assert (request.num_accepted, request.num_refused) == (3, 2)
    request.output_token_ids += [5, 7, 8, 9]
    token = SampledToken(7, after=(SampledToken(8), SampledToken(9)), refused=4)
    event = token_event(request, token, None)
    assert (event.index, event.token_ids, event.accepted, event.refused) == (1, [7, 8, 9], 2, 4)
