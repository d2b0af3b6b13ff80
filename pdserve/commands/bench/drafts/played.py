"""A runner whose answers are played: it computes all that a model does, and says what it is told.

A model of random weights says nothing that could be guessed. Of its steps only the time is real
here; which drafts are right is decided by the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from pdserve.engine.interface import Launcher, Runner, Sampled
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled


class PlayedRunner:
    """Implements `interface.Runner`."""

    launcher: Launcher | None = None

    def __init__(self, runner: Runner, answers: Mapping[str, Sequence[int]]) -> None:
        """`answers`: all tokens of each request, by its id."""
        self._runner = runner
        self._answers = answers

    @property
    def model_s(self) -> float:
        """As Runner.model_s."""
        return self._runner.model_s

    def prepare(
        self, rows: Sequence[Scheduled], progress: LayerProgress | None = None
    ) -> Callable[[], Sampled]:
        """As Runner.prepare."""
        compute = self._runner.prepare(rows, progress)
        places = [(row.request.request_id, len(row.request.output_token_ids)) for row in rows]

        def played() -> Sampled:
            return [
                token and _played(token, self._answers[request_id][place:])
                for token, (request_id, place) in zip(compute(), places, strict=True)
            ]

        return played

    def foresee(self, rows: Sequence[Scheduled]) -> None:
        """As Runner.foresee."""
        self._runner.foresee(rows)


def _played(token: SampledToken, told: Sequence[int]) -> SampledToken:
    """Behind a wrong draft anything may be drawn: nobody looks."""
    after = [replace(one, token_id=new) for one, new in zip(token.after, told[1:], strict=False)]
    return replace(token, token_id=told[0], after=tuple(after))
