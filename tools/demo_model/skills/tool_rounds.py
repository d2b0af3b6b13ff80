"""Questions with offered functions: the calls that they need, and the answer after the results."""

import json
import random
from dataclasses import dataclass
from typing import Any, Final

from tools.demo_model.skills import extraction, json_answers
from tools.demo_model.skills.json_fields import invented_name
from tools.demo_model.skills.json_schemas import Field, schema_of
from tools.demo_model.skills.json_values import city, decimal, identifier, integer, noun, person
from tools.demo_model.skills.tool_offers import Offer, class_offer, invented_function, offer_of
from tools.demo_model.skills.tools import TASKS, Task, Values
from tools.demo_model.skills.wording import capitalized, enumerated, invented_word

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
"""Offered beside questions that need other functions, or none."""


@dataclass(frozen=True)
class Round:
    """A question, the calls that it needs, their results, and the final answer."""

    offers: tuple[Offer, ...]
    question: str
    calls: tuple[str, ...]
    results: tuple[str, ...] = ()
    answer: str = ""
    others: tuple[Task, ...] = _USELESS
    """Further functions that may be offered although they do not help."""

    @property
    def first_answer(self) -> str:
        """The calls, or the answer if there are none."""
        return "\n".join(self.calls) or self.answer


def _draw_values(rng: random.Random, task: Task, names: dict[str, str]) -> tuple[Values, Values]:
    """Return the values of the question's slots, and of the arguments that it states."""
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
    """Return the arguments in the wording; required ones that it omits get the first choice."""
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
        # Number functions are told apart by their names; a calculator can do all of them.
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
    """Ask two questions in a row that need one function each."""
    first, second = (single_round(rng, task) for task in rng.sample(TASKS, 2))
    return Round(
        (*first.offers, *second.offers),
        f"{first.question} {second.question}",
        (*first.calls, *second.calls),
        (*first.results, *second.results),
        f"{first.answer} {second.answer}",
    )


def explicit_round(rng: random.Random) -> Round:
    """State which function is to be called, and with which arguments."""
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
    """Offer a type as a function: its arguments are the answer itself."""
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
    """Offer only functions that do not help with the question."""
    exchange = draw_exchange(rng)
    offer, _ = offer_of(rng, rng.choice(_USELESS))
    return Round((offer,), exchange.question, (), (), exchange.answer)


def draw_round(rng: random.Random, draw_exchange: json_answers.DrawExchange) -> Round:
    """Draw any kind of round."""
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
