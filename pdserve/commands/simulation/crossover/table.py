"""The matrix as a table, and what its reader must know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from pdserve.commands.simulation.crossover.bands import Band
from pdserve.commands.simulation.crossover.predict import STREAMS, TARGET, Sized, Tried
from pdserve.commands.simulation.crossover.results import CellResult, CrossoverReport

CLOSE = 0.97  # of the best goodput: as good, since predictions do not tell 3 %


def table(report: CrossoverReport) -> Table:
    """One row for each cell."""
    title = f"{report.model}: {report.scenario}, lengths times {report.length_scale:g}"
    if report.cells:
        promise = report.cells[0].promise
        title += (
            f"\npromised in all cells: TTFT {promise.ttft_s * 1e3:.0f} ms, TPOT "
            f"{promise.tpot_s * 1e3:.1f} ms, to {TARGET:.0%} of each kind; goodputs in requests/s"
        )
    made = Table(title=title, show_lines=True)
    for column in ("weights", "KV", "drafts"):
        made.add_column(column)
    for column in (f"decode ms, {STREAMS} streams", "prompt ms"):
        made.add_column(column, justify="right")
    for column in ("here, predicted", "here, measured", "they cross, predicted", "measured",
                   "best ratios, predicted"):  # fmt: skip
        made.add_column(column)
    for result in report.cells:
        made.add_row(*_cells(result))
    return made


def _cells(result: CellResult) -> Iterator[str]:
    cell, found = result.cell, result.predicted
    yield cell.formats.weights
    yield cell.formats.kv
    yield f"{result.guessed.tokens_per_step:.2f} tokens/step" if result.guessed else ""
    yield f"{found.decode_ms:.2f}"
    yield f"{found.prompt_ms:.1f}"
    yield goodputs(found.here)
    yield "\n".join(goodputs(one.here) for one in result.measured) or "-"
    yield crossing(found.here)
    yield "\n".join(crossing(one.here) for one in result.measured) or "-"
    yield "\n".join(ratio(sized) for sized in found.sizes)


def goodputs(sized: Sized) -> str:
    """The modes, best first: "multiplexed 15.5, disaggregated 1P1D 12.1, ..."."""
    return "\n".join(f"{one.deployment.text} {one.text}" for one in sized.best_of_modes)


def crossing(sized: Sized) -> str:
    """Where its modes cross: "all alike; from 3.1/s disaggregated, adaptive"."""
    return said(sized.bands, len(sized.best_of_modes))


def said(bands: Sequence[Band], of: int) -> str:
    """For people; `of` so many modes."""
    parts = []
    for number, band in enumerate(bands):
        names = "all alike" if len(band.best) == of else ", ".join(band.best)
        parts.append(f"from {band.rate:.3g}: {names}" if number else names)
    return "\n".join(parts)


def as_good(some: Sequence[Tried]) -> list[Tried]:
    """Return those whose goodputs are within 3 % of the best one."""
    best = max((one.goodput.rate for one in some), default=0.0)
    return [one for one in some if one.goodput.rate >= CLOSE * best]


def ratio(sized: Sized) -> str:
    """The best ratio of disaggregated nodes, and the best mode: "8: 5P3D 94.3; best adaptive"."""
    split = as_good(sized.of("disaggregated"))
    ratios = " or ".join(f"{d.prefill}P{d.decode}D" for d in (one.deployment for one in split))
    text = f"{sized.nodes}: {ratios} {split[0].text}"
    best = sized.best_of_modes[0]
    if best not in split:
        text += f"; best {best.deployment.text} {best.text}"
    return text


def remarks(report: CrossoverReport) -> Iterator[str]:
    """What the table does not say."""
    for result in report.cells:
        for one in result.measured:
            name = "{} {}P{}D".format(result.cell.name, *one.split)
            yield f"{name}: {one.answers or 'no answers were compared'}"
            yield from (f"{name}: {verdict}" for verdict in one.verdicts)
            yield from (f"{name}: {mode} is missing: {why}" for mode, why in one.failures.items())
    yield from (f"{name} was not measured: {why}" for name, why in report.failures.items())
    outside = sorted({what for result in report.cells for what in result.predicted.outside})
    if outside:
        yield f"predicted beyond what was calibrated: {', '.join(outside)}"
    models = sorted({result.guessed.model for result in report.cells if result.guessed})
    if models and report.random_right is not None:
        yield (
            f"drafts are looked up in texts, and are right as often as behind text of {models[0]}; "
            f"behind random tokens {report.random_right:.0%} of {report.model} were right"
        )
    revisions = sorted({result.revision for result in report.cells})
    if len(revisions) > 1:
        yield f"cells are of several revisions: {', '.join(revisions)}"


def markdown(report: CrossoverReport) -> Iterator[str]:
    """The lines of a smaller table, as documents have them."""
    yield (
        "| weights, KV | drafts | decode; prompt (ms) | best here, predicted; measured | "
        "co-located | best ratio, predicted |"
    )
    yield "|---|---|---|---|---|---|"
    for result in report.cells:
        found, formats = result.predicted, result.cell.formats
        heres = [found.here, *(one.here for one in result.measured[:1])]
        bests = [one.best_of_modes[0] for one in heres]
        shared = [one.of("colocated") for one in heres]
        guessed = result.guessed
        cells = (
            f"{formats.weights}, {formats.kv}",
            f"{guessed.tokens_per_step:.2f} tokens/step" if guessed else "none",
            f"{found.decode_ms:.2f}; {found.prompt_ms:.1f}",
            "; ".join(f"{one.deployment.mode} {one.text}" for one in bests),
            "; ".join(of_mode[0].text if of_mode else "-" for of_mode in shared),
            ratio(found.sizes[-1]),
        )
        yield f"| {' | '.join(cells)} |"
