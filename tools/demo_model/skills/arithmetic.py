"""Arithmetic: sums, differences, times tables, comparisons and one-step word problems.

The split key of a two-digit problem is the pair of numbers, not the wording: a held-out sum is
one whose numbers were never added in training, in either order, under any paraphrase.
"""

import random
from typing import Final

from tools.demo_model.exchange import Exchange
from tools.demo_model.skills.wording import capitalized

_ASK: Final = (
    "What is {q}?",
    "What is {q}?",
    "What's {q}?",
    "How much is {q}?",
    "Calculate {q}.",
    "Compute {q}.",
    "{q} = ?",
    "{q} =",
    "{q}",
    "{q}?",
    "Can you tell me what {q} is?",
    "Please work out {q}.",
    "Solve {q}.",
    "Do you know what {q} is?",
    "Tell me {q}.",
    "What does {q} equal?",
    "Hi, what is {q}?",
    "I need to know {q}.",
    "Help me with {q}.",
    "What do you get for {q}?",
)
_PLUS: Final = ("{a} + {b}", "{a} + {b}", "{a} plus {b}", "{a}+{b}", "the sum of {a} and {b}")
_MINUS: Final = ("{a} - {b}", "{a} - {b}", "{a} minus {b}", "{a}-{b}", "{a} take away {b}")
_TIMES: Final = ("{a} times {b}", "{a} * {b}", "{a} x {b}", "{a} × {b}", "{a} multiplied by {b}")
_OVER: Final = ("{a} divided by {b}", "{a} / {b}", "{a} ÷ {b}")

_NAMES: Final = ("Anna", "Tom", "Mia", "Ben", "Lily", "Sam", "Emma", "Leo", "Nora", "Max")
_GOODS: Final = (
    "apples", "books", "stones", "coins", "shells", "eggs", "pencils", "balls", "flowers",
    "cookies",
)  # fmt: skip
_GAIN: Final = (
    "{n} has {a} {g} and gets {b} more. How many {g} does {n} have now?",
    "{n} has {a} {g}. A friend gives {n} {b} more. How many {g} does {n} have?",
    "If {n} has {a} {g} and finds {b} more, how many {g} does {n} have?",
    "There are {a} {g} in a box and {b} {g} in a bag. How many {g} are there in all?",
)
_LOSE: Final = (
    "{n} has {a} {g} and loses {b}. How many {g} are left?",
    "{n} has {a} {g} and gives away {b}. How many {g} does {n} have left?",
    "If {n} has {a} {g} and sells {b} of them, how many {g} are left?",
    "There are {a} {g} in a box. {n} takes {b} of them. How many {g} are left in the box?",
)


def _operand(rng: random.Random) -> int:
    """Draw a number up to 100, small ones a little more often, as people type them."""
    return rng.randrange(101) if rng.random() < 0.85 else rng.randrange(13)


def _ask(rng: random.Random, forms: tuple[str, ...], a: int, b: int) -> str:
    expression = rng.choice(forms).format(a=a, b=b)
    return capitalized(rng.choice(_ASK).format(q=expression))


def addition(rng: random.Random) -> Exchange:
    """Ask for the sum of two numbers up to 100."""
    a, b = _operand(rng), _operand(rng)
    return Exchange(
        "addition",
        _ask(rng, _PLUS, a, b),
        f"{a} + {b} = {a + b}.",
        key=f"{min(a, b)},{max(a, b)}",
    )


def subtraction(rng: random.Random) -> Exchange:
    """Ask for the difference of two numbers up to 100; the result is now and then negative."""
    a, b = _operand(rng), _operand(rng)
    if a < b and rng.random() < 0.75:
        a, b = b, a
    return Exchange("subtraction", _ask(rng, _MINUS, a, b), f"{a} - {b} = {a - b}.", key=f"{a},{b}")


def times_table(rng: random.Random) -> Exchange:
    """Ask for a product from the twelve times tables. The facts are learned by heart."""
    a, b = rng.randrange(13), rng.randrange(13)
    question = _ask(rng, _TIMES, a, b)
    return Exchange("times table", question, f"{a} × {b} = {a * b}.", str(a * b), key=question)


def division(rng: random.Random) -> Exchange:
    """Ask for an exact quotient from the twelve times tables."""
    quotient, divisor = rng.randrange(13), rng.randrange(1, 13)
    a = quotient * divisor
    question = _ask(rng, _OVER, a, divisor)
    answer = f"{a} ÷ {divisor} = {quotient}."
    return Exchange("division", question, answer, str(quotient), key=question)


def word_problem(rng: random.Random) -> Exchange:
    """Describe a person who gains or loses a few things, and ask how many there are."""
    name, goods = rng.choice(_NAMES), rng.choice(_GOODS)
    a, b = rng.randrange(2, 21), rng.randrange(2, 13)
    if rng.random() < 0.5:
        forms, sign, result = _GAIN, "+", a + b
    else:
        a, b = max(a, b) + 1, min(a, b)
        forms, sign, result = _LOSE, "-", a - b
    question = rng.choice(forms).format(n=name, g=goods, a=a, b=b)
    answer = f"{a} {sign} {b} = {result} {goods}."
    return Exchange("word problem", question, answer, str(result), key=question)


def comparison(rng: random.Random) -> Exchange:
    """Ask which of two different numbers is bigger or smaller."""
    a, b = _operand(rng), _operand(rng)
    b = b if a != b else a + 1
    word, result = rng.choice(
        (("bigger", max(a, b)), ("larger", max(a, b)), ("smaller", min(a, b)))
    )
    other = a + b - result
    form = rng.choice(
        (
            "Which is {w}, {a} or {b}?",
            "Which number is {w}: {a} or {b}?",
            "What is {w}, {a} or {b}?",
        )
    )
    return Exchange(
        "comparison",
        form.format(w=word, a=a, b=b),
        f"{result} is {word} than {other}.",
        str(result),
        key=f"{min(a, b)},{max(a, b)}",
    )


def parity(rng: random.Random) -> Exchange:
    """Ask whether a number below 100 is even or odd."""
    n = rng.randrange(100)
    answer = "odd" if n % 2 else "even"
    form = rng.choice(
        ("Is {n} even or odd?", "Is {n} odd or even?", "Is the number {n} even or odd?")
    )
    return Exchange("parity", form.format(n=n), f"{n} is {answer}.", capitalized(answer), str(n))
