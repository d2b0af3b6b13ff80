"""Texts to measure drafts with, made from the source of Python's standard library.

What a served model is asked for most often repeats much of its prompt, or of what was said before.
A text is a prompt and its answer, as tokens. Sets are the same on every machine with the same
Python; those of `random` and `dice` on all.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Final

from pdserve.commands.bench.drafts.config import TextSet

Encode = Callable[[str], list[int]]

MOST_PROMPT: Final = 1024  # tokens
_RANDOM_PROMPT: Final = 256
_NUM_DICE: Final = 4  # ids of `dice`: each three of them were there before, and say nothing
_MODULES: Final = (
    "argparse", "ast", "calendar", "codecs", "configparser", "contextlib", "csv", "difflib",
    "enum", "fractions", "functools", "heapq", "imaplib", "inspect", "ipaddress", "optparse",
    "pathlib", "shlex", "shutil", "smtplib", "statistics", "subprocess", "tempfile", "textwrap",
    "threading", "traceback", "urllib/parse", "uuid", "zipfile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked and what is answered."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    source: str
    doc: str

    @property
    def first_line(self) -> str:
        return self.source.partition("\n")[0].strip()


def make_texts(name: TextSet, encode: Encode, num_ids: int, count: int, tokens: int) -> list[Text]:
    """Return texts of a set, over again if there are fewer.

    Args:
        name: of the set.
        encode: makes tokens of text.
        num_ids: of the vocabulary.
        count: of texts.
        tokens: of each answer.
    """
    if name in ("random", "dice"):
        ids = num_ids if name == "random" else _NUM_DICE
        return [random_text(seed, ids, tokens) for seed in range(count)]
    made = _SETS[name](encode)
    fit = (t for t in made if len(t.answer) >= tokens and len(t.prompt) <= MOST_PROMPT)
    found = [Text(text.prompt, text.answer[:tokens]) for text in islice(fit, count)]
    assert found, f"{name} has no answer of {tokens} tokens"
    return [found[number % len(found)] for number in range(count)]


def functions_text() -> str:
    """Return all the functions that texts are made of, one after the other."""
    return "\n\n".join(function.source for function in _functions())


def random_text(seed: int, num_ids: int, tokens: int, prompt: int = _RANDOM_PROMPT) -> Text:
    """Return a prompt of so many tokens, and as random an answer."""
    draw = random.Random(seed)
    ids = [draw.randrange(num_ids) for _ in range(prompt + tokens)]
    return Text(ids[:prompt], ids[prompt:])


def _summaries(encode: Encode) -> Iterator[Text]:
    """Some functions, and of each how it is called and what it is for."""
    for some in _several(3):
        prompt = "Summarise each function:\n\n" + "\n\n".join(f.source for f in some)
        lines = [f"{f.name}: `{f.first_line}` {_sentence(f.doc)}\n" for f in some]
        yield Text(encode(prompt), encode("\n".join(lines)))


def _edits(encode: Encode) -> Iterator[Text]:
    """A function, and the whole of it with a name changed."""
    for function in _functions():
        changed = function.source.replace("self", "this").replace(function.name, "renamed")
        prompt = f"Call `self` `this`, and {function.name} `renamed`:\n\n{function.source}\n\n"
        yield Text(encode(prompt), encode(f"```python\n{changed}\n```\n"))


def _retrieval(encode: Encode) -> Iterator[Text]:
    """Passages, and the two that are asked for, word by word."""
    for some in _several(5):
        passages = "\n\n".join(f"[{n}] {f.name}: {f.doc}" for n, f in enumerate(some))
        asked = (some[1], some[3])
        prompt = f"{passages}\n\nWhat do {asked[0].name} and {asked[1].name} do?\n"
        quoted = [f'As [{n}] says, "{f.doc}"\n' for n, f in zip((1, 3), asked, strict=True)]
        yield Text(encode(prompt), encode("So: ".join(quoted)))


def _agents(encode: Encode) -> Iterator[Text]:
    """Turns of an agent that reads functions and writes tests: each as in the turn before, and on.

    It is to be asked twice, as agents are that try again.
    """
    for some in _several(2):
        seen = ""
        for function in some:
            call = json.dumps({"tool": "read", "path": f"src/{function.name}.py"})
            seen += f"<call>{call}</call>\n<result>{function.source}</result>\n"
            body = f"def test_{function.name}():\n    # {_sentence(function.doc)}\n"
            body += "\n".join(f"    assert {name}" for name in _names(function.source))
            answer = json.dumps({"tool": "write", "path": f"{function.name}_test", "text": body})
            yield Text(encode(seen), encode(f"<call>{answer}</call>\n"))
            seen += f"<call>{answer}</call>\n"


_SETS: Final[dict[TextSet, Callable[[Encode], Iterator[Text]]]] = {
    "summaries": _summaries,
    "edits": _edits,
    "retrieval": _retrieval,
    "agents": _agents,
}


def _several(number: int) -> Iterator[Sequence[_Function]]:
    functions = _functions()
    for start in range(0, len(functions) - number, number):
        yield functions[start : start + number]


@cache
def _functions() -> list[_Function]:
    """Documented functions that are neither very short nor very long."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = []
    for module in _MODULES:
        text = (folder / f"{module}.py").read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            source = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            doc = ast.get_docstring(node)
            if doc and len(doc) > 120 and 400 < len(source) < 1600:
                found.append(_Function(node.name, source, doc))
    return found


def _names(source: str) -> list[str]:
    """The longest names of a function: what its tests would mention."""
    words = {word for word in source.split() if "." in word or "(" in word}
    return sorted(words, key=lambda word: (-len(word), word))[:6]


def _sentence(doc: str) -> str:
    return doc.partition(".")[0].replace("\n", " ") + "."
