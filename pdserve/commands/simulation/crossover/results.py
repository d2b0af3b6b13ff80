"""The files of a run: a killed one goes on where it stopped."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.crossover.cells import CELLS, Cell, Formats
from pdserve.commands.simulation.crossover.config import CrossoverConfig
from pdserve.commands.simulation.crossover.measure import Measured
from pdserve.commands.simulation.crossover.predict import Predicted
from pdserve.commands.simulation.crossover.texts import Guessed
from pdserve.measured.calibration import Calibration, read_calibration, write_calibration
from pdserve.shared.errors import ConfigError

_SETTINGS, _REPORT, _TABLE = "settings.json", "report.json", "table.md"
_ARCHIVE = "crossover.tar.gz"

S = TypeVar("S", bound=msgspec.Struct)


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a cell."""

    cell: Cell
    revision: str  # of the source tree that has found it
    promise: Promise
    guessed: Guessed | None  # None: without drafts
    predicted: Predicted
    measured: list[Measured] = []  # by ratio, the one that is predicted to be the best first


class CrossoverReport(msgspec.Struct, frozen=True, kw_only=True):
    """All cells that are known."""

    model: str
    scenario: str
    length_scale: float
    random_right: float  # share of guessed tokens that were right behind random ones
    cells: list[CellResult]
    failures: dict[str, str]  # cell |-> why it was not measured

    @property
    def is_sound(self) -> bool:
        """Whether nothing has failed, and modes gave the same answers everywhere."""
        measured = [one for cell in self.cells for one in cell.measured]
        return not self.failures and all(one.is_sound for one in measured)


class Results:
    """The folder of a run."""

    def __init__(self, config: CrossoverConfig, setup: dict[str, object]) -> None:
        """Begin, or go on.

        Raises:
            ConfigError: it has the results of another question or machine, or cannot be written.
        """
        self.folder = config.folder
        machine = setup["machine"]
        assert isinstance(machine, dict)
        asked = {
            "model": config.model,
            "shape": "" if config.model else config.shape,
            "scenario": config.scenario,
            "quick": config.quick,
            "engine": msgspec.to_builtins(config.engine),
            "processor": machine["processor"],
            "cores": machine["cores"],
            "kernels": setup["kernels"],
        }
        file = self.folder / _SETTINGS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in ("calibrations", "cells", "measured"):
                (self.folder / name).mkdir(exist_ok=True)
            former = msgspec.json.decode(file.read_bytes()) if file.exists() else asked
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--out {self.folder}: cannot be used: {error}") from error
        other = [name for name, value in asked.items() if former.get(name) != value]
        if other:
            raise ConfigError(
                f"--out {self.folder}: has results with another {', '.join(other)}: name a new "
                "directory, or remove it"
            )
        file.write_bytes(msgspec.json.encode(asked) + b"\n")

    def calibration(self, formats: Formats) -> Calibration | None:
        """Return what was calibrated; None: not yet. Raises CalibrationError: it is broken."""
        file = self._calibration(formats)
        return read_calibration(file) if file.exists() else None

    def keep_calibration(self, formats: Formats, made: Calibration) -> None:
        """Write a calibration."""
        write_calibration(made, self._calibration(formats))

    def cell(self, cell: Cell) -> CellResult | None:
        """Return what is known of a cell; None: nothing.

        Raises:
            ConfigError: its file is broken.
        """
        file = self._cell(cell)
        if not file.exists():
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=CellResult)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{file} is no result of ours: {error}; remove it") from error

    def keep(self, result: CellResult) -> None:
        """Write a cell, whole or not at all."""
        _write(self._cell(result.cell), result)

    def cells(self) -> list[CellResult]:
        """Return all that are known. Raises as `cell`."""
        found = [self.cell(cell) for cell in CELLS]
        return [one for one in found if one is not None]

    def raw(self, cell: Cell, split: tuple[int, int]) -> Path:
        """Return the folder of a measurement's requests."""
        return self.folder / "measured" / f"{cell.name}-{split[0]}P{split[1]}D"

    def keep_report(self, report: CrossoverReport, lines: Iterable[str]) -> None:
        """Write the report of all cells, and the `lines` of its table."""
        _write(self.folder / _REPORT, report)
        (self.folder / _TABLE).write_text("".join(f"{line}\n" for line in lines))

    def archive(self) -> Path:
        """Pack everything, for a release; return the file."""
        file = self.folder / _ARCHIVE
        with tarfile.open(file, "w:gz") as archive:
            for path in sorted(self.folder.rglob("*")):
                if path.is_file() and path != file:
                    name = Path(self.folder.name) / path.relative_to(self.folder)
                    archive.add(path, arcname=str(name))
        return file

    def _calibration(self, formats: Formats) -> Path:
        return self.folder / "calibrations" / f"{formats.name}.json"

    def _cell(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.json"


def _write(file: Path, result: msgspec.Struct) -> None:
    whole = file.with_name(f".{file.name}.new")
    whole.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    whole.replace(file)
