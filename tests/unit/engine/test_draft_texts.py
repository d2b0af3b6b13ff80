"""Whose texts drafts come from."""

from __future__ import annotations

from pdserve.engine.drafts.texts import FormerAnswers, OwnText, Predictions
from pdserve.engine.request import Request
from pdserve.lifecycle import Targets
from tests.requests import make_request
from tests.unit.engine.test_speculation import adopted, core_of, step

PROMPT = list(range(100, 140))
ANSWER = [7, 8, 9, 10, 11, 12]


def asked(tenant: str = "ann", salt: str = "", output: tuple[int, ...] = ()) -> Request:
    targets = Targets(payer=f"tenant {tenant}", tenant=tenant)
    return make_request(PROMPT, output, salt, targets=targets)


def drafts(source: FormerAnswers | Predictions, request: Request, most: int = 9) -> list[int]:
    drafter = source.drafter(request)
    return [] if drafter is None else list(drafter.propose(request, most)[0])


def told(most_bytes: int = 10**9) -> FormerAnswers:
    """What ann was told."""
    former = FormerAnswers(most_bytes)
    former.ended(asked(output=(*ANSWER,)))
    return former


def test_a_tenants_former_answer_is_proposed_from_its_first_token_on() -> None:
    former = told()
    assert drafts(former, asked()) == ANSWER
    assert drafts(former, asked(output=(7, 8))) == ANSWER[2:]


def test_nobody_is_given_what_others_were_told() -> None:
    former = told()
    assert drafts(former, asked("eve")) == []
    assert drafts(former, asked(salt="s")) == []
    nobody = asked("")
    nobody.output_token_ids += ANSWER
    former.ended(nobody)
    assert drafts(former, asked("")) == []


def test_what_goes_on_at_another_node_is_no_answer_yet() -> None:
    former, moving = FormerAnswers(), asked(output=(*ANSWER,))
    moving.leg_token_limit = len(ANSWER)
    former.ended(moving)
    assert drafts(former, asked()) == []


def test_memory_is_bounded_and_who_was_not_here_for_long_is_forgotten() -> None:
    former = told(most_bytes=40_000)  # a dozen tenants, as long as they have said little
    for number in range(100):
        former.ended(asked(f"tenant {number}", output=(*ANSWER,)))
        assert former.num_bytes <= 40_000
        if number < 50:
            assert drafts(former, asked()) == ANSWER, "she is still here"
        drafts(former, asked("ann", f"salt {number}"))
    assert drafts(former, asked("tenant 99")) == ANSWER
    assert drafts(former, asked()) == []


def test_a_predicted_answer_is_proposed_where_it_fits() -> None:
    request = make_request(PROMPT, prediction=[1, 2, 3, 4, 5, 6])
    source = Predictions()
    assert drafts(source, request) == [1, 2, 3, 4, 5, 6]
    request.output_token_ids += [1, 9, 3, 4]
    assert drafts(source, request) == []
    request.output_token_ids += [5]
    assert drafts(source, request) == [6]
    assert source.drafter(make_request(PROMPT)) is None


def test_what_a_stream_needs_is_counted_until_it_is_over() -> None:
    own, predicted = OwnText(), Predictions()
    core = core_of(sources=[own, predicted])
    request = adopted(core, PROMPT, [7], max_tokens=2, prediction=[7] * 1000)
    (done,) = step(core, [8])
    assert own.num_bytes >= 12 * len(PROMPT)
    assert predicted.num_bytes >= 12_000
    core.forget(done)
    assert (own.num_bytes, predicted.num_bytes) == (0, 0)
    assert request.guesses is None


def test_the_engine_says_when_streams_are_over() -> None:
    for is_cancelled in (False, True):
        former = FormerAnswers()
        core = core_of(sources=[former])
        request = adopted(core, PROMPT, [7], max_tokens=3)
        request.targets = Targets(tenant="ann")
        step(core, [8])
        if is_cancelled:
            core.cancel(request.request_id)
            assert drafts(former, asked()) == [7, 8]
            continue
        (done,) = step(core, [9])
        core.forget(done)
        assert drafts(former, asked()) == [7, 8, 9]
