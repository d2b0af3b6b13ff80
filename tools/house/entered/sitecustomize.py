"""Loaded by every Python process whose PYTHONPATH names this folder: notes the functions it enters.

SIGUSR1 begins, and the next one writes "FILE NAME" of each, one a line, to $HOUSE_ENTERED/PID.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

_entered: set[CodeType] = set()
_is_noting = False


def _note(frame: FrameType, event: str, _: object) -> None:
    if _is_noting and event == "call":
        _entered.add(frame.f_code)


def _turn(number: int, _: FrameType | None) -> None:
    global _is_noting
    _is_noting = not _is_noting
    if not _is_noting:
        functions = {
            f"{code.co_filename} {code.co_qualname}"
            for code in _entered
            if code.co_name != "<module>"
        }
        target = Path(os.environ["HOUSE_ENTERED"], str(os.getpid()))
        written = target.with_suffix(".tmp")
        written.write_text("\n".join(sorted(functions)))
        written.rename(target)
        _entered.clear()


signal.signal(signal.SIGUSR1, _turn)
threading.setprofile(_note)  # of threads that begin from now on; in force from their first call
sys.setprofile(_note)
