"""What the log of a process looks like, whatever others have said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from pdserve.commands.cli.log import log_to


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, level = logging.getLogger(), logging.getLogger().level
    kept, root.handlers = root.handlers, []
    stream = io.StringIO()
    log_to(stream)
    yield stream
    root.handlers, root.level = kept, level


def test_a_message_is_one_line_of_printable_text(stream: io.StringIO) -> None:
    said = "socket: Too many open files\n\x00\x1b[2J\x7f\u2028 INFO fake: é 漢"
    logging.getLogger("pdserve.test").warning("lost %s", said)
    (line,) = stream.getvalue().split("\n")[:-1]
    assert line.endswith(
        r"WARNING pdserve.test: lost socket: Too many open files\n\x00\x1b[2J\x7f\u2028 INFO "
        "fake: é 漢"
    )


def test_a_traceback_keeps_its_lines_and_nothing_else_that_is_not_text(
    stream: io.StringIO,
) -> None:
    try:
        raise ValueError("\x00\x1b[2J")
    except ValueError:
        logging.getLogger("pdserve.test").exception("an odd fault")
    lines = stream.getvalue().splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == r"ValueError: \x00\x1b[2J"


def test_grpcs_own_complaint_of_bytes_that_it_made_itself_is_left_out(
    stream: io.StringIO,
) -> None:
    grpc_log = logging.getLogger("grpc._cython.cygrpc")
    grpc_log.error("Invalid encoding on %s", b"failed to connect\n\x00\x00")
    assert stream.getvalue() == ""
    grpc_log.error("something else")
    assert "something else" in stream.getvalue()


def test_json_has_the_request_that_a_line_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_LOG", "json")
    root, level, kept = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers
    root.handlers, stream = [], io.StringIO()
    try:
        log_to(stream)
        log = logging.getLogger("pdserve.test")
        log.error("chatcmpl-0123456789abcdef~1 cannot go on:\n%s", "\x1b[2J")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("an odd fault")
    finally:
        root.handlers, root.level = kept, level
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["request_id"] == "chatcmpl-0123456789abcdef"
    assert first["message"].endswith("cannot go on:\n\x1b[2J")
    assert (first["level"], first["logger"]) == ("error", "pdserve.test")
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "request_id" not in second
    assert second["exception"].endswith("ValueError: why")
