"""The positions of all constrained answers, kept between steps, or rebuilt from an answer's tokens.

Grammars come from clients. The library bounds most of the cost of a mask, but not all: so positions
in grammars that are not clearly light are advanced in separate threads. An answer whose mask takes
too much CPU time fails. Until then, for a fifth of a second, the other answers of the step wait for
it, but no longer: its thread ends by itself when its computation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar.mask_jobs import (
    MASK_CPU_S,
    MASK_S,
    MaskJob,
    MaskLimits,
    wait_for_masks,
)
from pdserve.engine.grammar.masks import WORD_BITS, TokenMasks
from pdserve.engine.grammar.position import Position
from pdserve.engine.request import Request
from pdserve.errors import GrammarFailed
from pdserve.grammar import CompiledGrammar, DeepThreads

_NAME = "grammar"


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """A request and its position."""

    request: Request
    position: Position
    is_light: bool  # computing its mask takes less time than waking a thread


class GrammarProgress:
    """Computes the masks of each step. Called from one thread, that of the engine."""

    def __init__(
        self, num_threads: int = 1, mask_s: float = MASK_S, mask_cpu_s: float = MASK_CPU_S
    ) -> None:
        """
        Args:
            num_threads: number of threads that compute masks at the same time.
            mask_s: time limit for one mask, in seconds.
            mask_cpu_s: CPU time limit for one mask, in seconds.
        """
        self._num_threads = num_threads
        self._limits = MaskLimits(mask_cpu_s, mask_s)
        self._threads = DeepThreads(num_threads, _NAME)
        self._answers: dict[str, _Answer] = {}

    @property
    def num_answers(self) -> int:
        """Number of positions that are kept."""
        return len(self._answers)

    def masks(self, requests: Sequence[Request]) -> TokenMasks | None:
        """Return the masks of all answers that have a grammar; None if no answer has one.

        Args:
            requests: the rows that are sampled; only read. Their grammars are compiled.

        Raises:
            GrammarFailed: the masks of some requests cannot be computed; names these requests.
        """
        rows = [row for row, request in enumerate(requests) if request.sampling.grammar]
        self._forget_ended()
        if not rows:
            return None
        vocab_size = _grammar_of(requests[rows[0]]).vocabulary.vocab_size
        bits = np.zeros((len(rows), -(-vocab_size // WORD_BITS)), dtype=np.int32)
        answers = [self._answer(requests[row]) for row in rows]
        self._fill(list(zip(answers, bits, strict=True)))
        return TokenMasks(rows, bits)

    # ---- parts ---------------------------------------------------------------------------------

    def write_mask(self, answer: _Answer, bits: npt.NDArray[np.int32]) -> None:
        """Advance the answer's position by its new tokens, and write its mask; in any thread."""
        position = answer.position
        position.advance(answer.request.output_token_ids[position.num_tokens :])
        position.fill(bits)

    def _write_at_once(
        self, answer: _Answer, bits: npt.NDArray[np.int32], failures: dict[str, str]
    ) -> None:
        try:
            self.write_mask(answer, bits)
        except GrammarFailed as error:
            failures[answer.request.request_id] = error.message

    def _forget_ended(self) -> None:
        """Drop the positions of requests that are done; there is no other notification of that."""
        ended = [i for i, answer in self._answers.items() if answer.request.is_done]
        for request_id in ended:
            del self._answers[request_id]

    def _answer(self, request: Request) -> _Answer:
        """Return the request's kept position, or a new one.

        A position kept under the same id for another `Request` object is not used.
        """
        answer = self._answers.get(request.request_id)
        if answer is None or answer.request is not request:
            grammar = _grammar_of(request)
            position = Position(grammar, request.sampling.stop_token_ids)
            answer = _Answer(request, position, grammar.is_light)
            self._answers[request.request_id] = answer
        return answer

    def _fill(self, rows: list[tuple[_Answer, npt.NDArray[np.int32]]]) -> None:
        """Write the masks of all rows. Raises GrammarFailed."""
        failures: dict[str, str] = {}
        for row in rows:
            if row[0].is_light:
                self._write_at_once(*row, failures)
        rows = [row for row in rows if not row[0].is_light]
        while rows:
            started = [MaskJob(partial(self.write_mask, *row)) for row in rows]
            jobs = {self._threads.submit(job): job for job in started}
            late = wait_for_masks(jobs, self._limits, self._abandon)
            rows, of_jobs = [], rows
            for future, row in zip(jobs, of_jobs, strict=True):
                request_id = row[0].request.request_id
                if future in late:
                    failures[request_id] = (
                        f"no mask within {self._limits.cpu_s:g} s of CPU time, "
                        f"{self._limits.wall_s:g} s in all"
                    )
                elif future.cancelled():
                    rows.append(row)  # it was queued behind one that took too long: try again
                else:
                    _note(future, request_id, failures)
        if failures:
            for request_id in failures:
                del self._answers[request_id]
            said = "; ".join(sorted(set(failures.values())))  # each request's client is told
            raise GrammarFailed(f"the grammar cannot be followed: {said}", list(failures))

    def _abandon(self) -> None:
        self._threads.abandon()
        self._threads = DeepThreads(self._num_threads, _NAME)


def _grammar_of(request: Request) -> CompiledGrammar:
    assert request.grammar is not None, "a request is submitted with its grammar compiled"
    return request.grammar


def _note(future: Future[None], request_id: str, failures: dict[str, str]) -> None:
    error = future.exception()
    if isinstance(error, GrammarFailed):
        failures[request_id] = error.message
    elif error is not None:
        raise error
