"""The log of a process: one line per message, of printable characters only.

Messages quote what peers and clients have said. Control characters in it could fake further
messages, or change the terminal of whoever reads the log.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final, TextIO, TypeAlias

_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)
_GRPC: Final = "grpc._cython.cygrpc"


def log_to(stream: TextIO) -> None:
    """Log to `stream` from now on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(_FORMAT))
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


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Invalid encoding on")
