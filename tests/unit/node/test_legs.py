"""What of a step goes into one message, and what does not."""

from __future__ import annotations

from pdserve.node.legs import Legs
from pdserve.protocol import PromptLogprobs, TokenBatch, TokenEvent
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
