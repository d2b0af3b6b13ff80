"""The subprocess that prepares grammars: `python -m pdserve.grammar.child`.

Grammars come from clients, and the library's limits do not bound the cost of all of them. A thread
that takes too long cannot be stopped, and it shares our memory; the kernel can limit and kill a
process. Input is one JSON value per line: first what to build the vocabulary from (`Beginning`),
then grammars. Each input line is answered with one output line.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from pdserve.errors import TokenizerError
from pdserve.grammar.deep_threads import DeepThreads
from pdserve.grammar.preparing import prepare
from pdserve.grammar.vocabulary import make_vocabulary

_MAX_BYTES = 4 << 30  # of address space; the deep stack and a large vocabulary take about 1 GiB


class Beginning(msgspec.Struct, frozen=True):
    """The first input line. It is answered with a `Ready`."""

    tokenizer_json: str
    num_ids: int
    end_id: int
    cpu_s: float  # CPU time limit per grammar, after which the process is killed


class Ready(msgspec.Struct, frozen=True):
    """The process accepts grammars, unless `fault` says what is wrong with the tokenizer."""

    fault: str = ""


def _serve() -> None:
    beginning = msgspec.json.decode(sys.stdin.buffer.readline(), type=Beginning)
    try:
        vocabulary = make_vocabulary(
            beginning.tokenizer_json, beginning.num_ids, [beginning.end_id]
        )
    except TokenizerError as error:
        _tell(Ready(error.message))
        return
    _tell(Ready())
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, beginning.cpu_s)
        prepared = prepare(vocabulary, msgspec.json.decode(line, type=str))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _tell(prepared)


def _tell(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    # Ctrl-C in a terminal goes to all processes, but this one ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    DeepThreads(1, "grammar").submit(_serve).result()
