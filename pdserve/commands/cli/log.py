"""The log of a process: one line per message, of printable characters only.

Messages quote what peers and clients have said. Control characters in it could fake further
messages, or change the terminal of whoever reads the log. With PDSERVE_LOG=json in the environment,
each line is a JSON object, with the id of the request that it is about, if there is one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Protocol, TypeAlias

_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)
LOG_VARIABLE: Final = "PDSERVE_LOG"
# As the API makes them; what nodes append for an attempt or an answer is left out.
_REQUEST_ID: Final = re.compile(r"\b(?:chatcmpl|cmpl|embd|resp)[-_][0-9a-f]{8,64}\b")
_GRPC: Final = "grpc._cython.cygrpc"


class LineStream(Protocol):
    """What a log is written to."""

    def write(self, lines: str, /) -> Any:
        """Take whole lines."""
        ...

    def flush(self) -> Any:
        """Pass on what it has taken."""
        ...


def log_to(stream: LineStream) -> None:
    """Log to `stream` from now on, in the form that the environment says."""
    handler = logging.StreamHandler(stream)
    is_json = os.environ.get(LOG_VARIABLE) == "json"
    handler.setFormatter(_JsonFormatter() if is_json else _Formatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # When sockets cannot be made, gRPC's description of that ends with bytes of an address. It logs
    # with a traceback that these are no text; our log says what has failed.
    logging.getLogger(_GRPC).addFilter(_is_worth_logging)


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """As logging.Formatter.formatMessage."""
        return _printable(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        """As logging.Formatter.formatException."""
        return "\n".join(map(_printable, super().formatException(ei).split("\n")))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object: JSON escapes what is not printable."""
        message = record.getMessage()
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if found := _REQUEST_ID.search(message):
            line["request_id"] = found[0]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Invalid encoding on")
