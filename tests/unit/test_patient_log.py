"""A log that nobody reads holds nobody up, and loses nothing before it says so."""

from __future__ import annotations

import logging
import os
import pty
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.shared.process.patient_log import MOST_BYTES, PatientLog

LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def taken(fd: int, log: PatientLog) -> str:
    """All that there is to read now, and comes as it is read."""
    os.set_blocking(fd, False)
    text = b""
    while True:
        try:
            text += os.read(fd, 1 << 16)
        except BlockingIOError:
            return text.decode()
        log.flush()


def test_what_nobody_reads_is_kept_in_order_and_then_counted(pipe: tuple[int, int]) -> None:
    """Most of this would wait for ever, and be counted, in a log that waits."""
    reader, writer = pipe
    log = PatientLog(writer)
    num_lines = 2 * MOST_BYTES // len(LINE)
    for number in range(num_lines):
        log.write(f"{number:>99}\n")
    *lines, last = taken(reader, log).splitlines()
    assert [int(line) for line in lines] == [*range(len(lines))]
    assert len(lines) * len(LINE) > MOST_BYTES
    assert last == f"pdserve: {num_lines - len(lines)} lines of the log were lost: nobody took them"
    log.write(LINE)
    assert taken(reader, log) == LINE


def test_a_line_of_any_length_is_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = PatientLog(writer)
    long = "y" * (2 * MOST_BYTES) + "\n"
    log.write(long)
    assert taken(reader, log) == long


def test_a_reader_that_has_gone_and_a_full_disk_hold_nobody_up() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        for fd in (writer, full):
            log = PatientLog(fd)
            for _ in range(2 * MOST_BYTES // len(LINE)):
                log.write(LINE)
    finally:
        os.close(writer)
        os.close(full)


def test_a_held_terminal_has_all_lines_when_it_is_released() -> None:
    """Nothing more has to be written for that."""
    reader, terminal = pty.openpty()
    try:
        log = PatientLog(terminal)
        assert log.isatty()
        termios.tcflow(terminal, termios.TCOOFF)  # as Ctrl-S
        log.write("one\n")
        log.finish(0.01)
        log.write("two\n")
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 100)
        termios.tcflow(terminal, termios.TCOON)
        log.finish(30.0)
        assert os.read(reader, 100) == b"one\r\ntwo\r\n"
    finally:
        os.close(reader)
        os.close(terminal)


def test_a_terminal_that_nobody_reads_holds_nobody_up() -> None:
    """It is not held, but full in the middle of a line."""
    reader, terminal = pty.openpty()
    try:
        log = PatientLog(terminal)
        for _ in range(400):
            log.write(LINE)
        text = b""
        while text.count(b"\n") < 400:
            text += os.read(reader, 1 << 16)
        assert text.decode() == 400 * LINE.replace("\n", "\r\n")
    finally:
        os.close(reader)
        os.close(terminal)


def test_logging_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        log = logging.Logger("a", logging.INFO)
        log.addHandler(logging.StreamHandler(PatientLog(file.fileno())))
        log.info("one")
        log.warning("two, %s", "\udcff")
    assert path.read_text() == "one\ntwo, \\udcff\n"
