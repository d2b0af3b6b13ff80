"""The evaluation's probes: conversations on which no run was trained.

Names, small talk and system messages come from closed lists, so for these probes it is the
combination that is held out.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tools.demo_model.conversation import Conversation, Message
from tools.demo_model.corpus import BRIEF, dialogue, draw_exchange
from tools.demo_model.exchange import Exchange, Skill, draw, draw_pair
from tools.demo_model.skills import (
    arithmetic,
    json_answers,
    questions,
    smalltalk,
    stories,
    tool_calls,
    tool_rounds,
    words,
)
from tools.demo_model.skills.relations import RELATIONS

_OPEN_SKILLS: Final[tuple[Skill, ...]] = (
    arithmetic.addition,
    arithmetic.subtraction,
    arithmetic.times_table,
    arithmetic.division,
    arithmetic.word_problem,
    arithmetic.comparison,
    words.spelling,
    words.reversing,
    words.length,
    words.first_or_last,
    stories.story,
    smalltalk.beyond_reach,
    smalltalk.nonsense,
    smalltalk.too_large,
)
"""Skills with plenty of held-out exchanges; the tables of facts have fewer."""
_BY_SCHEMA: Final = "json by schema"


@dataclass(frozen=True)
class Probe:
    """A conversation whose last answer is evaluated."""

    skill: str
    conversation: Conversation

    @property
    def question(self) -> str:
        """The last question."""
        return self.conversation.messages[-2].text

    @property
    def expected(self) -> str:
        """The answer that training would have given."""
        return self.conversation.messages[-1].text

    def is_right(self, answer: str) -> bool:
        """Whether the answer is right: as expected or, where there is a choice, valid."""
        if self.skill == "story":
            return stories.answers_request(answer, self.question)
        if self.skill == _BY_SCHEMA:
            return _has_same_result(answer, self.expected)
        return answer == self.expected


def _has_same_result(answer: str, expected: str) -> bool:
    """Return whether the answer has the same properties, and the same value for the first."""
    try:
        found = json.loads(answer)
    except json.JSONDecodeError:
        return False
    wanted: dict[str, object] = json.loads(expected)
    first = next(iter(wanted))
    return isinstance(found, dict) and list(found) == list(wanted) and found[first] == wanted[first]


def held_out_probes(seed: int, num_per_skill: int) -> list[Probe]:
    """Draw `num_per_skill` probes of every skill without duplicates; a fifth of that per table."""
    rng = random.Random(seed)
    probes = [
        _single(draw(skill, rng, held_out=True))
        for skill in _OPEN_SKILLS
        for _ in range(num_per_skill)
    ]
    probes += [
        _single(draw(relation, rng, held_out=True))
        for relation in RELATIONS
        for _ in range(max(1, num_per_skill // 5))
    ]
    for _ in range(num_per_skill):
        probes += _in_conversation(rng)
        probes += _in_json(rng)
        probes += _with_tools(rng)
    return list({probe.conversation: probe for probe in probes}.values())


def _single(exchange: Exchange) -> Probe:
    return Probe(exchange.skill, dialogue([exchange]))


def _fact(rng: random.Random) -> Exchange:
    return draw(rng.choice(RELATIONS), rng, held_out=True)


def _in_conversation(rng: random.Random) -> Iterator[Probe]:
    """Yield probes that depend on an earlier turn or on the system message, and small talk."""
    told, asked = smalltalk.introduction(rng)
    yield Probe("memory", dialogue([told, draw_exchange(rng), asked]))
    yield Probe("follow-up", dialogue(draw_pair(questions.follow_up, rng, held_out=True)))
    yield Probe("brief answers", dialogue([_fact(rng)], rng.choice(BRIEF), is_brief=True))
    yield _single(smalltalk.small_talk(rng))


def _in_json(rng: random.Random) -> Iterator[Probe]:
    """Yield probes that ask for JSON."""
    yield Probe("json answers", json_answers.plain_request(rng, _fact(rng)))
    yield Probe(_BY_SCHEMA, json_answers.described_request(rng, _fact(rng)))
    yield Probe("json extraction", json_answers.extraction_request(rng, held_out=True))


def _with_tools(rng: random.Random) -> Iterator[Probe]:
    """Yield probes that offer functions, and probes after function calls."""
    idle = tool_rounds.idle_round(rng, _fact)
    yield _calling("tools not needed", rng, idle)
    while True:
        drawn = tool_rounds.draw_round(rng, _fact)
        if tool_calls.is_held_out(drawn) and drawn.results:
            break
    yield _calling("tool calls" if len(drawn.calls) == 1 else "parallel calls", rng, drawn)
    messages = (*tool_calls.asked(rng, drawn), *tool_calls.outcome(drawn))
    yield Probe("tool results", Conversation(messages))


def _calling(skill: str, rng: random.Random, drawn: tool_rounds.Round) -> Probe:
    reply = Message("assistant", drawn.first_answer)
    return Probe(skill, Conversation((*tool_calls.asked(rng, drawn), reply)))
