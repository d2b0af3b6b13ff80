"""The report as one page without anything beside it: verdicts, tables and plots."""

from __future__ import annotations

from html import escape
from io import StringIO
from pathlib import Path

import msgspec
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console, RenderableType

from pdserve.commands.bench.compare.report import CompareReport
from pdserve.commands.bench.compare.shown.plot import figures
from pdserve.commands.bench.compare.shown.table import tables, verdict_lines

_WIDTH = 220  # columns of text
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pdserve bench compare</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem }
p, h1, h2 { overflow-wrap: anywhere }
pre { font: 12px/1.3 ui-monospace, monospace; overflow-x: auto }
svg { max-width: 100%; height: auto; background: #fff }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } }
</style></head><body>
<h1>Goodput compared</h1>
"""


def save_page(report: CompareReport, folder: Path) -> Path:
    """Write the page into a folder that exists."""
    parts = [_HEAD]
    for scenario in report.scenarios:
        parts += [f"<h2>{escape(scenario.name)}</h2>"]
        modes = [mode for mode in report.modes if mode.scenario == scenario.name]
        parts += [f"<p>{escape(line)}</p>" for line in verdict_lines(scenario, modes)]
        parts += [_svg(figure) for _, figure in figures(scenario, modes)]
    parts += [f"<pre>{escape(_text(table))}</pre>" for table in tables(report)]
    setup = msgspec.json.format(msgspec.json.encode(report.setup), indent=2).decode()
    parts.append(f"<h2>Setup</h2>\n<pre>{escape(setup)}</pre></body></html>")
    path = folder / "report.html"
    path.write_text("\n".join(parts))
    return path


def _text(table: RenderableType) -> str:
    console = Console(file=StringIO(), width=_WIDTH)
    with console.capture() as said:
        console.print(table, markup=False)
    return said.get()


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    drawn = StringIO()
    with rc_context({"svg.hashsalt": "pdserve"}):  # the same report gives the same page
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]
