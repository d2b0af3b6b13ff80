"""Questions with functions on offer: which calls they take, and what is said of the results."""

import json
import random
from dataclasses import dataclass
from typing import Any, Final

from pdserve.demo_model import extraction, json_answers
from pdserve.demo_model.json_fields import invented_name
from pdserve.demo_model.json_schemas import Field, schema_of
from pdserve.demo_model.json_values import city, decimal, identifier, integer, noun, person
from pdserve.demo_model.tool_offers import Offer, class_offer, invented_function, offer_of
from pdserve.demo_model.tools import TASKS, Task, Values
from pdserve.demo_model.wording import capitalized, enumerated, invented_word

_EXPLICIT: Final = (
    "Call {f} with {p}.", "Use {f} with {p}.", "Please call {f} with {p}.", "Run {f}: {p}.",
    "Use the tool {f} with {p}.", "Call the function {f} with {p}.",
)  # fmt: skip
_ANSWER_NAMES: Final = ("Answer", "Ans", "Result", "Response", "Reply", "Output", "FinalAnswer")
_PERSON_NAMES: Final = (
    "Person",
    "User",
    "UserInfo",
    "Contact",
    "Customer",
    "UserDetail",
    "Profile",
)
_PLAIN_VALUES: Final = (noun, person, city, identifier, integer, integer, decimal)
_USELESS: Final = tuple(task for task in TASKS if task.slots[0].slot not in {"a", "sum", "query"})
"""For questions that other functions are to answer, or none."""


@dataclass(frozen=True)
class Round:
    """A question, the calls that it takes, what they return, and what is said then."""

    offers: tuple[Offer, ...]
    question: str
    calls: tuple[str, ...]
    results: tuple[str, ...] = ()
    answer: str = ""
    others: tuple[Task, ...] = _USELESS
    """What may be offered besides without being of use."""

    @property
    def first_answer(self) -> str:
        """The calls; what is said where there are none."""
        return "\n".join(self.calls) or self.answer


def _draw_values(rng: random.Random, task: Task, names: dict[str, str]) -> tuple[Values, Values]:
    """Return what the question is filled with, and the values of the arguments it says."""
    said: Values = {}
    values: Values = {}
    for slot in task.slots:
        value = slot.draw(rng)
        is_said = not slot.is_optional or (slot.slot in names and rng.random() < 0.5)
        if slot.is_optional:
            said[slot.slot] = slot.said.format(v=value) if is_said else ""
        else:
            said[slot.slot] = value
        if is_said:
            values[slot.slot] = value
    return said, values


def _arguments(
    task: Task, offer: Offer, names: dict[str, str], values: Values, question: str
) -> dict[str, Any]:
    """Return what the wording says; of what is required and not said, the first choice."""
    arguments = {}
    for slot in task.slots:
        name = names.get(slot.slot)
        if name is None:
            continue
        value = values.get(slot.slot)
        if not slot.is_optional or (value is not None and value in question):
            arguments[name] = value
        elif name in offer.required:
            arguments[name] = slot.choices[0]
    return arguments


def single_round(rng: random.Random, task: Task) -> Round:
    """Ask for one call."""
    offer, names = offer_of(rng, task)
    said, values = _draw_values(rng, task, names)
    question = rng.choice(task.questions).format(**said)
    known = said | task.extras(rng, said)
    result, answer = (form.format(**known) for form in rng.choice(task.outcomes))
    call = offer.call(_arguments(task, offer, names, values, question))
    others = _USELESS
    if task.slots[0].slot == "a":
        # Of functions for numbers the right one is known by its name; a calculator can do it all.
        others = tuple(o for o in TASKS if o is not task and o.slots[0].slot != "sum")
    return Round((offer,), capitalized(question), (call,), (result,), capitalized(answer), others)


def double_round(rng: random.Random, task: Task) -> Round:
    """Ask for two calls of one function."""
    offer, names = offer_of(rng, task)
    outcome = rng.choice(task.outcomes)
    calls, results, answers, named = [], [], [], []
    for _ in range(2):
        said, values = _draw_values(rng, task, {})
        known = said | task.extras(rng, said)
        calls.append(offer.call(_arguments(task, offer, names, values, "")))
        results.append(outcome[0].format(**known))
        answers.append(capitalized(outcome[1].format(**known)))
        named.append(task.both.format(**said))
    question = rng.choice(task.pairs).format(x=named[0], y=named[1])
    return Round((offer,), question, tuple(calls), tuple(results), " ".join(answers))


def two_tasks_round(rng: random.Random) -> Round:
    """Ask two things in a row, for a function each."""
    first, second = (single_round(rng, task) for task in rng.sample(TASKS, 2))
    return Round(
        (*first.offers, *second.offers),
        f"{first.question} {second.question}",
        (*first.calls, *second.calls),
        (*first.results, *second.results),
        f"{first.answer} {second.answer}",
    )


def explicit_round(rng: random.Random) -> Round:
    """Say which function is to be called, and with what."""
    name = invented_function(rng) if rng.random() < 0.5 else rng.choice(rng.choice(TASKS).names)
    arguments = {
        invented_name(rng).replace(" ", "_"): rng.choice(_PLAIN_VALUES)(rng)
        for _ in range(rng.randint(1, 3))
    }
    fields = tuple(Field(k, v, schema_of(v)) for k, v in arguments.items())
    offer = Offer(name, rng.choice(("", f"Does {invented_word(rng)}.")), fields, tuple(arguments))
    form = rng.choice(("{k} = {v}", "{k} {v}", "{k}={v}", "{k}: {v}"))
    said = [
        form.format(k=k, v=v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()
    ]
    question = rng.choice(_EXPLICIT).format(f=name, p=enumerated(said))
    return Round((offer,), question, (offer.call(arguments),), ("ok",), "Done.")


def class_round(rng: random.Random, draw_exchange: json_answers.DrawExchange) -> Round:
    """Offer a type under the name of a function: the answer itself is to be its arguments."""
    if rng.random() < 0.5:
        told, fields = extraction.draw_statement(rng)
        question = extraction.request(rng, told)
        offer = class_offer(rng, _PERSON_NAMES, fields)
    else:
        exchange = json_answers.exchange_with_result(draw_exchange, rng)
        question, fields = exchange.question, json_answers.answer_fields(rng, exchange)
        offer = class_offer(rng, _ANSWER_NAMES, fields)
    return Round((offer,), question, (offer.call({f.name: f.value for f in fields}),))


def idle_round(rng: random.Random, draw_exchange: json_answers.DrawExchange) -> Round:
    """Offer what does not help with the question."""
    exchange = draw_exchange(rng)
    offer, _ = offer_of(rng, rng.choice(_USELESS))
    return Round((offer,), exchange.question, (), (), exchange.answer)


def draw_round(rng: random.Random, draw_exchange: json_answers.DrawExchange) -> Round:
    """Draw any of these."""
    kind = rng.random()
    if kind < 0.42:
        return single_round(rng, rng.choice(TASKS))
    if kind < 0.56:
        return double_round(rng, rng.choice([task for task in TASKS if task.pairs]))
    if kind < 0.62:
        return two_tasks_round(rng)
    if kind < 0.70:
        return explicit_round(rng)
    if kind < 0.80:
        return class_round(rng, draw_exchange)
    return idle_round(rng, draw_exchange)
