"""`pdserve route train` and `pdserve route evaluate`."""

from __future__ import annotations

from pathlib import Path

from pdserve.measured.routes import (
    HeldOut,
    Judged,
    OutcomesHeader,
    read_classifier,
    read_outcomes,
    write_classifier,
)
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK


def train(outcomes: Path, output: Path) -> int:
    """Fit a classifier to a file of outcomes, write it, and its curve beside it; the exit code.

    Raises ConfigError.
    """
    header, found = read_outcomes(outcomes)
    from pdserve.commands.cli.routes.fit import trained  # slow to import: torch

    classifier = trained(header.tiers, found)
    write_classifier(classifier, output)
    plot = output.with_suffix(".png")
    _save(header, classifier.held_out, plot)
    print("\n".join(table(header, classifier.held_out)))
    print(f"threshold {classifier.threshold:.2f}; written to {output}, its curve to {plot}")
    return OK


def evaluate(file: Path, outcomes: Path) -> int:
    """Judge a classifier on other outcomes than it was fitted to; the exit code.

    Raises ConfigError.
    """
    classifier = read_classifier(file)
    header, found = read_outcomes(outcomes)
    if header.tiers != classifier.tiers:
        raise ConfigError(
            f"{file} was fitted to the tiers {', '.join(classifier.tiers)}, and {outcomes} is of "
            f"{', '.join(header.tiers)}"
        )
    from pdserve.commands.cli.routes.fit import judged

    print("\n".join(table(header, judged(classifier, found))))
    return OK


def table(header: OutcomesHeader, found: HeldOut) -> list[str]:
    """One line for each way to answer, with its quality and its cost."""
    rows = {
        f"{header.tiers[1]} alone": found.large,
        "cascade": found.cascade,
        "with the classifier": found.classified,
    }
    lines = [f"{found.large.num} outcomes that were not fitted"]
    return lines + [_line(name, judged) for name, judged in rows.items()]


def _line(name: str, judged: Judged) -> str:
    return (
        f"{name:<24} quality {judged.quality:6.1%}  cost {judged.cost:6.1%}  "
        f"skips the first tier for {judged.skipped:.0%}"
    )


def _save(header: OutcomesHeader, found: HeldOut, path: Path) -> None:
    """Plot quality over cost. Raises ConfigError: it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    curve = [(100 * one.cost, 100 * one.quality) for one in found.curve]
    axes.plot(*zip(*curve, strict=True), "-", color="tab:blue", label="by threshold")
    for name, one, mark in (
        (f"{header.tiers[1]} alone", found.large, "s"),
        ("cascade without it", found.cascade, "o"),
        ("chosen", found.classified, "D"),
    ):
        axes.plot(100 * one.cost, 100 * one.quality, mark, label=name)
    axes.set_xlabel(f"cost (% of {header.tiers[1]} alone)")
    axes.set_ylabel("quality (%)")
    axes.set_title(f"{found.large.num} outcomes that were not fitted", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)
    FigureCanvasAgg(figure)  # renders without a display
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
