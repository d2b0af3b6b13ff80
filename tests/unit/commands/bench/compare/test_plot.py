"""Pictures: there are PNGs, and they show what is in the report."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdserve.commands.bench.compare.report import ModeReport
from pdserve.commands.bench.compare.shown.plot import attainment_figure, latency_figure, save_plots
from tests.unit.commands.bench.compare.made_reports import TARGET, made_report, row


@pytest.mark.long  # test_compare_run.py has them by default
def test_every_scenario_gets_two_pictures(tmp_path: Path) -> None:
    saved = save_plots(made_report(), tmp_path / "new" / "folder")
    assert [path.name for path in saved] == ["made-up-attainment.png", "made-up-latency.png"]
    for path in saved:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert path.stat().st_size > 10_000


def test_attainment_is_drawn_as_in_distserve() -> None:
    report = made_report()
    (axes,) = attainment_figure(report.scenarios[0], report.modes).axes
    lines = {
        (str(line.get_linestyle()), str(line.get_color())): [list(d) for d in line.get_data()]
        for line in axes.lines
        if not _is_vertical(line)
    }
    assert lines["-", "tab:blue"] == [[1.0, 2.0], [100.0, 80.0]]  # both
    assert lines[":", "tab:blue"] == [[1.0, 2.0], [100.0, 100.0]]  # TTFT
    assert lines["--", "tab:orange"] == [[1.0, 2.0], [100.0, 40.0]]  # TPOT
    assert lines["-", "grey"][1] == [100 * TARGET] * 2
    crossings = sorted(float(line.get_xdata()[0]) for line in axes.lines if _is_vertical(line))  # type: ignore[index]
    assert crossings == pytest.approx([1 + 1 / 6, 1.5])
    assert axes.get_xlim()[0] > 0.9, "there is nothing at lower rates"


def test_runs_at_one_rate_are_one_point_and_other_servers_have_colours_of_their_own() -> None:
    """The line crosses the target where goodput is said to be."""
    report = made_report()
    both = {"rows": [row(1.0, 10), row(2.0, 8), row(2.0, 4)]}
    modes = [replaced(report.modes[0], both | {"mode": name}) for name in ("vllm", "sglang")]
    (axes,) = attainment_figure(report.scenarios[0], modes).axes
    solid = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in solid] == [[100.0, 60.0]] * 2
    assert len({line.get_color() for line in solid}) == 2


def replaced(mode: ModeReport, changes: dict[str, object]) -> ModeReport:
    return msgspec.structs.replace(mode, **changes)


def _is_vertical(line) -> bool:  # type: ignore[no-untyped-def]
    return len(set(line.get_xdata())) == 1 and list(line.get_ydata()) == [0, 1]


def test_latencies_are_drawn_beside_what_is_promised() -> None:
    report = made_report()
    ttft, tpot, itl = latency_figure(report.scenarios[0], report.modes).axes
    assert [len(axes.lines) for axes in (ttft, tpot, itl)] == [3, 3, 2]
    assert list(ttft.lines[-1].get_ydata()) == [1000.0] * 2
    assert list(tpot.lines[-1].get_ydata()) == [20.0] * 2


def test_nobody_to_draw_is_no_fault() -> None:
    scenario = made_report().scenarios[0]
    (axes,) = attainment_figure(scenario, []).axes
    assert axes.get_legend() is None
    assert len(latency_figure(scenario, []).axes) == 3


def test_a_mode_without_any_token_has_no_latencies() -> None:
    report = made_report()
    (first, _) = report.modes
    silent = type(first)(
        **{name: getattr(first, name) for name in first.__struct_fields__}
        | {"rows": [row(1.0, 0, num_refused=10)]}
    )
    ttft, _, _ = latency_figure(report.scenarios[0], [silent]).axes
    assert len(ttft.lines) == 1
