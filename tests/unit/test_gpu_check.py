"""The check for GPUs works before there is one: the same phases, with tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdserve.commands.cli.main import build_parser
from tests.matrix import matrix
from tools.gpu_check.__main__ import Phase, interpreted, json_in, phases, run_phase

SHORT = ("doctor", "step", "transfer")  # what the others start is tested elsewhere


@pytest.mark.parametrize(("has_gpu", "num_gpus"), [(False, 1), (True, 1), (True, 2)])
def test_every_command_exists(has_gpu: bool, num_gpus: int) -> None:
    found = phases(has_gpu=has_gpu, num_gpus=num_gpus)
    for phase in found:
        if phase.arguments[:2] == ["-m", "pdserve"]:
            assert build_parser().parse_args(phase.arguments[2:])
    assert sum(phase.limit_s for phase in found) < 60 * 60
    assert ("step-ranks" in [phase.name for phase in found]) == (not has_gpu or num_gpus > 1)


@pytest.mark.parametrize("name", matrix(SHORT, {"transfer"}))
def test_phases_run_and_report(name: str, tmp_path: Path) -> None:
    (phase,) = (phase for phase in phases(has_gpu=False) if phase.name == name)
    assert run_phase(phase, sys.executable, tmp_path) == ""
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["report"]
    assert written["command"][0] == "python"


def test_what_fails_or_hangs_is_written_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    failing = Phase("failing", 60, ["-c", "print('so far'); raise SystemExit(3)"])
    hanging = Phase("hanging", 0.5, ["-c", "import time; print('x', flush=True); time.sleep(60)"])
    wrong = Phase("wrong", 60, ["-c", "print('1 skipped: needs an NVIDIA GPU')"], interpreted)
    assert run_phase(failing, sys.executable, tmp_path) == "exit code 3"
    assert run_phase(hanging, sys.executable, tmp_path) == "not done within 0.5 s"
    assert "torch finds no GPU" in run_phase(wrong, sys.executable, tmp_path)
    assert json.loads((tmp_path / "failing.json").read_text())["output"] == "so far\n"


def test_reports_are_found_among_other_lines() -> None:
    assert json_in('a line {"no": 1}\n{"a": [1]}\nmore') == {"a": [1]}
    assert json_in("nothing") is None
    assert interpreted("12 passed in 3 s") == ""
    assert interpreted("no tests ran") == "no test has run"
