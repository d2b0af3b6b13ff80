"""The process that prepares grammars: `python -m pdserve.grammar.child`.

They are clients' texts, and no limit of the library's holds for all of them. A thread that takes
too long cannot be stopped, and its memory is ours; a process can be, and the kernel does it.
One JSON value a line comes in: what to make a vocabulary of, then grammars. For each, one goes out.
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

_MAX_BYTES = 4 << 30  # of addresses; the deep stack and a large vocabulary take one of these


class Beginning(msgspec.Struct, frozen=True):
    """The first line. What is answered is a `Ready`."""

    tokenizer_json: str
    num_ids: int
    end_id: int
    cpu_s: float  # for each grammar; then the process is ended


class Ready(msgspec.Struct, frozen=True):
    """Grammars are taken, unless there is something wrong with the tokenizer."""

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it ends with its parent
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    DeepThreads(1, "grammar").submit(_serve).result()
