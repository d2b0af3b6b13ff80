"""The functions that conversations offer, with many names and many ways to ask for them.

A `Task` is the purpose of a function. Each time it is drawn, the function and its parameters get
one of their names, so that a correct call requires reading the offer.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tools.demo_model.skills.json_values import (
    Draw,
    city,
    clock_time,
    identifier,
    integer,
    noun,
    number_between,
    person,
    phrase,
    sentence,
)

Values = dict[str, Any]
"""slot |-> value, of one question."""


@dataclass(frozen=True)
class Slot:
    """A parameter: its possible names and values."""

    slot: str
    names: tuple[str, ...]
    draw: Draw
    description: str = ""
    choices: tuple[str, ...] = ()
    """If not empty, the value is one of them."""
    is_optional: bool = False
    """Questions state it with `said`, or not at all."""
    said: str = ""

    @property
    def json_type(self) -> str:
        """Type in a schema, which is that of any drawn value."""
        return "integer" if isinstance(self.draw(random.Random(0)), int) else "string"


@dataclass(frozen=True)
class Task:
    """A purpose that a function can have."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    questions: tuple[str, ...]
    extras: Callable[[random.Random, Values], Values]
    """Draws further values, for results."""
    outcomes: tuple[tuple[str, str], ...]
    """Results of the function, and the answers that state them."""
    pairs: tuple[str, ...] = ()
    """Questions that need two calls; {x} and {y} are what `both` makes of each."""
    both: str = ""


def one_of(*choices: str) -> Draw:
    """Return a function that draws one of these."""
    return lambda rng: rng.choice(choices)


def _nothing(_: random.Random, __: Values) -> Values:
    return {}


def _weather(rng: random.Random, _: Values) -> Values:
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy"))
    return {"sky": sky, "degrees": rng.randint(-9, 38)}


def _computed(rng: random.Random, values: Values) -> Values:
    """Compute a result that the model itself may not be able to compute."""
    a, b = values["a"], values["b"]
    return {"sum": a + b, "difference": a - b, "product": a * b}


_CITY: Final = Slot("city", ("city", "city", "city", "location", "location", "place", "town"), city,
                    "The name of the city")  # fmt: skip
_UNIT: Final = Slot("unit", ("unit", "units", "scale"), one_of("celsius", "fahrenheit"),
                    "The unit of the temperature", ("celsius", "fahrenheit"), True,
                    " in {v}")  # fmt: skip
_NUMBER: Final = number_between(0, 999)
_A: Final = Slot("a", ("a", "a", "a", "x", "first", "num1", "left"), _NUMBER, "The first number")
_B: Final = Slot("b", ("b", "b", "b", "y", "second", "num2", "right"), _NUMBER, "The second number")


def _sum_task(
    names: tuple[str, ...], verb: str, forms: tuple[str, ...], sign: str, result: str
) -> Task:
    asks = ("What is {q}?", "{q}", "Calculate {q}.", "How much is {q}?", "What's {q}?", "{q} = ?")
    told = f"{{a}} {sign} {{b}} = {{{result}}}."
    return Task(
        names,
        (f"{verb} two numbers.", f"{verb} two integers", f"{verb} a and b."),
        (_A, _B),
        (*(ask.format(q=form) for ask in asks for form in forms), f"{verb} {{a}} and {{b}}."),
        _computed,
        (
            (f"{{{result}}}", told),
            (f"{{{result}}}", told),
            (f'{{{{"result": {{{result}}}}}}}', told),
        ),
        ("What is {x} and what is {y}?", "Calculate {x} and {y}.", "What are {x} and {y}?"),
        forms[0],
    )


TASKS: Final = (
    Task(
        ("get_weather", "get_weather", "weather", "get_current_weather", "fetch_weather",
         "current_weather", "weather_in", "getWeather", "weather_forecast"),
        ("Get the weather of a city.", "Get the current weather for a location.", "Get weather",
         "Returns the weather in a given place."),
        (_CITY, _UNIT),
        ("What is the weather in {city}{unit}?", "What's the weather in {city}{unit}?",
         "What is the weather like in {city}{unit}?", "What's the weather like in {city} today?",
         "What is the weather like in {city} today?",
         "How is the weather in {city}{unit}?", "Is it raining in {city}?",
         "Tell me the weather in {city}{unit}.", "How warm is it in {city}{unit}?",
         "Weather in {city}{unit}?", "What is the temperature in {city}{unit}?",
         "I am in {city}. What is the weather?", "Get the weather for {city}."),
        _weather,
        (
            ("{sky}", "It is {sky} in {city}."),
            ("{sky}, {degrees} degrees", "It is {sky} in {city}, {degrees} degrees."),
            ('{{"temperature": {degrees}, "condition": "{sky}"}}',
             "It is {sky} in {city}, {degrees} degrees."),
            ('{{"city": "{city}", "weather": "{sky}"}}', "It is {sky} in {city}."),
            ("{degrees}", "It is {degrees} degrees in {city}."),
        ),
        ("What is the weather in {x} and in {y}?", "What is the weather in {x} and {y}?",
         "What's the weather like in {x} and {y}?", "Compare the weather in {x} and {y}."),
        "{city}",
    ),
    _sum_task(("add", "add", "add_numbers", "sum", "plus", "add_integers"), "Add",
              ("{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}"), "+", "sum"),
    _sum_task(("multiply", "multiply", "times", "product", "mul"), "Multiply",
              ("{a} * {b}", "{a} times {b}", "{a} x {b}", "{a} multiplied by {b}"), "×",
              "product"),
    _sum_task(("subtract", "minus", "sub", "difference"), "Subtract",
              ("{a} - {b}", "{a} minus {b}"), "-", "difference"),
    Task(
        ("calculator", "calculate", "evaluate", "calc", "compute", "math"),
        ("Evaluate an expression.", "A calculator.", "Compute the value of an expression."),
        (Slot("sum", ("expression", "expression", "expr", "formula", "input"),
              lambda rng: f"{_NUMBER(rng)} {rng.choice('+-*/')} {_NUMBER(rng)}",
              "The expression to evaluate"),),
        ("What is {sum}?", "Calculate {sum}.", "{sum}", "How much is {sum}?", "Compute {sum}."),
        lambda rng, _: {"n": integer(rng)},
        (("{n}", "{sum} = {n}."), ('{{"result": {n}}}', "{sum} = {n}.")),
        ("What is {x} and what is {y}?", "Calculate {x} and {y}."),
        "{sum}",
    ),
    Task(
        ("search", "search", "web_search", "lookup", "find", "google", "search_web",
         "search_documents"),
        ("Search the web.", "Search for something.", "Look something up.",
         "Search for documents about a query."),
        (Slot("query", ("query", "query", "q", "text", "term", "keywords"),
              lambda rng: rng.choice((phrase, noun, person))(rng), "What to search for"),),
        ("Search for {query}.", "Look up {query}.", "Search the web for {query}.",
         "Find something about {query}.", "Please search for {query}.", "Google {query}."),
        lambda rng, _: {"found": sentence(rng)},
        (("{found}", "{found}"), ('{{"result": "{found}"}}', "{found}")),
        ("Search for {x} and for {y}.", "Look up {x} and {y}."),
        "{query}",
    ),
    Task(
        ("get_time", "current_time", "time_in", "get_current_time", "clock"),
        ("Get the time in a city.", "Returns the current time.", "Tell the time of a place."),
        (_CITY,),
        ("What time is it in {city}?", "Tell me the time in {city}.", "What is the time in {city}?",
         "How late is it in {city}?"),
        lambda rng, _: {"time": clock_time(rng)},
        (("{time}", "It is {time} in {city}."),
         ('{{"time": "{time}"}}', "It is {time} in {city}.")),
        ("What time is it in {x} and in {y}?", "What time is it in {x} and {y}?"),
        "{city}",
    ),
    Task(
        ("send_message", "send_email", "message", "send_mail", "text_user", "notify"),
        ("Send a message to somebody.", "Send a text.", "Send an email to a person."),
        (Slot("to", ("to", "to", "recipient", "person", "user", "name"), person, "Who gets it"),
         Slot("text", ("text", "message", "body", "content"), phrase, "What to say")),
        ('Send "{text}" to {to}.', "Tell {to}: {text}.", "Send {to} a message: {text}.",
         'Write "{text}" to {to}.', "Message {to}: {text}."),
        _nothing,
        (("ok", "I have sent it to {to}."), ("sent", "I have sent it to {to}."),
         ('{{"status": "sent"}}', "I have sent it to {to}.")),
    ),
    Task(
        ("get_user", "find_user", "get_order", "load_record", "get_item", "fetch_customer"),
        ("Get a record by its id.", "Look up an entry.", "Fetch by id."),
        (Slot("id", ("id", "user_id", "key", "number", "record_id"), _NUMBER, "The id"),),
        ("Get number {id}.", "Find the user with id {id}.", "Who is user {id}?",
         "Show me order {id}.", "Look up item {id}.", "Get the record {id}."),
        lambda rng, _: {"name": person(rng)},
        (("{name}", "Number {id} is {name}."), ('{{"name": "{name}"}}', "Number {id} is {name}.")),
        ("Get the users {x} and {y}.", "Look up items {x} and {y}."),
        "{id}",
    ),
    Task(
        ("get_stock_price", "stock_price", "get_price", "quote", "price_of"),
        ("Get the price of something.", "Returns the current price.", "Get a stock price."),
        (Slot("symbol", ("symbol", "ticker", "name", "company", "product"),
              lambda rng: rng.choice((identifier, noun, person))(rng), "What to price"),),
        ("What is the price of {symbol}?", "How much does {symbol} cost?",
         "Get the price of {symbol}.", "What does {symbol} cost?"),
        lambda rng, _: {"price": rng.randint(1, 999)},
        (("{price}", "The price of {symbol} is {price}."),
         ('{{"price": {price}}}', "The price of {symbol} is {price}.")),
        ("What are the prices of {x} and {y}?", "How much do {x} and {y} cost?"),
        "{symbol}",
    ),
    Task(
        ("set_light", "turn_light", "switch_lamp", "set_lamp", "control_light"),
        ("Switch a light.", "Turn the light in a room on or off.", "Control the lamps."),
        (Slot("room", ("room", "place", "where", "lamp"), noun, "Which light"),
         Slot("state", ("state", "mode", "status", "to"), one_of("on", "off"), "On or off",
              ("on", "off"))),
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.",
         "Turn the lamp in the {room} {state}.", "Light in the {room} {state}, please."),
        _nothing,
        (("ok", "The light in the {room} is {state}."),
         ("done", "The light in the {room} is {state}.")),
    ),
    Task(
        ("set_timer", "start_timer", "timer", "remind_me", "set_alarm"),
        ("Set a timer.", "Start a timer of some minutes.", "Wait and ring."),
        (Slot("minutes", ("minutes", "duration", "time", "length"), number_between(1, 90),
              "How many minutes"),),
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.",
         "Start a timer of {minutes} minutes.", "Remind me in {minutes} minutes."),
        _nothing,
        (("ok", "I will ring in {minutes} minutes."),
         ("started", "I will ring in {minutes} minutes.")),
    ),
)  # fmt: skip
