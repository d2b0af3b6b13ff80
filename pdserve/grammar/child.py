"""The subprocess that prepares grammars: `python -m pdserve.grammar.child`.

Grammars come from clients, and the library's limits do not bound the cost of all of them. A thread
that takes too long cannot be stopped, and it shares our memory; the kernel can limit and kill a
process. Input is one JSON value per line: first what to build the vocabulary from (`Beginning`),
then grammars. Each input line is answered with one output line.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec

from pdserve.grammar.deep_threads import DeepThreads
from pdserve.grammar.preparing import prepare
from pdserve.grammar.vocabulary import Vocabulary, load_vocabulary, make_vocabulary
from pdserve.shared.errors import TokenizerError
from pdserve.shared.process.limited_child import answer_lines, leave_interrupts_to_parent, tell

_MAX_BYTES = 4 << 30  # of address space; the deep stack and a large vocabulary take about 1 GiB


class Beginning(msgspec.Struct, frozen=True):
    """The first input line. It is answered with a `Ready`."""

    tokenizer_json: str  # empty: it is that of the checkpoint at `path`
    num_ids: int
    end_id: int
    cpu_s: float  # CPU time limit per grammar, after which the process is killed
    path: str = ""


class Ready(msgspec.Struct, frozen=True):
    """The process accepts grammars, unless `fault` says what is wrong with the tokenizer."""

    fault: str = ""


def _vocabulary(beginning: Beginning) -> Vocabulary:
    num_ids, end_ids = beginning.num_ids, [beginning.end_id]
    if beginning.path:
        return load_vocabulary(Path(beginning.path), num_ids, end_ids)
    return make_vocabulary(beginning.tokenizer_json, num_ids, end_ids)


def _serve() -> None:
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    try:
        vocabulary = _vocabulary(beginning)
    except TokenizerError as error:
        tell(Ready(error.message))
        return
    tell(Ready())
    grammars = msgspec.json.Decoder(str)
    answer_lines(lambda line: prepare(vocabulary, grammars.decode(line)), beginning.cpu_s)


if __name__ == "__main__":
    leave_interrupts_to_parent()
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    DeepThreads(1, "grammar").submit(_serve).result()
