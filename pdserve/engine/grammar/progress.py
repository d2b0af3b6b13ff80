"""The positions of all constrained answers, kept between steps, or rebuilt from an answer's tokens.

Grammars come from clients. The library bounds most of the cost of a mask, but not all: so positions
in grammars that are not clearly light are advanced in separate threads. An answer whose mask takes
too much CPU time fails: its thread ends by itself when its computation is done.

Even light grammars can be so ambiguous that a mask takes milliseconds, and a call may have many
answers. So in each step the masks of one payer have a budget, by what their last ones took; beyond
it, and where nothing is known yet, masks are computed beside the steps (`ahead.py`), and their
answers sit steps out until they are ready (`hold`). That changes no token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar.ahead import MaskAhead, MaskQueue
from pdserve.engine.grammar.answer import Answer, grammar_of
from pdserve.engine.grammar.mask_jobs import (
    MASK_S,
    MaskJob,
    MaskLimits,
    wait_for_masks,
)
from pdserve.engine.grammar.masks import WORD_BITS, TokenMasks
from pdserve.engine.request import Ahead, Request, Scheduled
from pdserve.grammar import DeepThreads
from pdserve.grammar.budget import ALONE_CPU_S, MASK_CPU_S, STEP_CPU_S
from pdserve.shared.errors import GrammarFailed

_NAME = "grammar"
_LEAST_S: Final = 1e-9
_BESIDE: Final = MaskLimits(wall_s=30.0)  # where a mask waits for a core that steps have


class GrammarProgress:
    """Computes the masks of each step. Called from one thread, that of the engine."""

    def __init__(
        self,
        num_threads: int = 1,
        mask_s: float = MASK_S,
        mask_cpu_s: float = MASK_CPU_S,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """
        Args:
            num_threads: number of threads that compute masks at the same time.
            mask_s: time limit for one mask, in seconds.
            mask_cpu_s: CPU time limit for one mask, in seconds.
            cpu_clock: of the thread that computes a step.
        """
        self._num_threads = num_threads
        self._limits = MaskLimits(mask_cpu_s, mask_s)
        self._threads = DeepThreads(num_threads, _NAME)
        self._answers: dict[str, Answer] = {}
        self._queue = MaskQueue(1, _BESIDE)
        # By payer: of its share of the step that is planned.
        self._left_s: defaultdict[str, float] = defaultdict(float)
        self._cpu_clock = cpu_clock

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
        bits = np.zeros((len(rows), _num_words(requests[rows[0]])), dtype=np.int32)
        # Behind the row of a request are those of its drafts.
        begins = [i for i, row in enumerate(rows) if not isinstance(requests[row], Ahead)]
        ends = [*begins[1:], len(rows)]
        self._fill(
            [
                (self._answer(requests[rows[begin]]), bits[begin:end])
                for begin, end in zip(begins, ends, strict=True)
            ]
        )
        return TokenMasks(rows, bits)

    def hold(self, rows: Sequence[Scheduled], wake: Callable[[], None]) -> set[Request]:
        """Return the requests of a planned step whose masks are to be ready before they are in one.

        Called on the event loop, while no step of these requests runs. `wake` is called there when
        a mask is ready.
        """
        requests = [row.request for row in rows]
        masked = [r for r in requests if r.grammar is not None and r.is_decoding]
        if not masked:
            return set()
        self._queue.wake = wake
        self._forget_ended()
        is_alone = len({request.targets.payer for request in requests}) == 1
        most_s = ALONE_CPU_S if is_alone else STEP_CPU_S
        left_s = self._left_s = defaultdict(lambda: most_s)
        held: set[Request] = set()
        for request in masked:
            answer, payer = self._answer(request), request.targets.payer
            if not answer.has_mask() and answer.ahead is None:
                cost_s = inf if answer.cost_s is None else answer.cost_s
                if cost_s <= left_s[payer]:
                    left_s[payer] -= cost_s
                    continue
                self._begin(answer)
            if not answer.has_mask():
                held.add(request)
        return held

    # ---- drafts --------------------------------------------------------------------------------

    # Called on the event loop, for requests of a planned step that are not held.

    def allowed(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of these tokens, as far as they may come next, one after the other.

        Of a grammar that may be heavy there are none: a mask that nobody needs could take long.
        """
        answer = self._answer(request)
        return answer.allowed(token_ids) if answer.may_have_drafts else ()

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Return at most so many tokens that must come next; often there are none."""
        answer = self._answer(request)
        return answer.forced()[:most] if answer.may_have_drafts else ()

    def mask_s(self, request: Request) -> float:
        """Return what a mask is predicted to take in the step; infinity if that is not known."""
        cost_s = self._answer(request).cost_s
        return inf if cost_s is None else cost_s

    def afford(self, request: Request, num_drafts: int) -> int:
        """Return for how many of these its payer's share of the step is left, and spend it."""
        cost_s, payer = self.mask_s(request), request.targets.payer
        num_drafts = int(min(num_drafts, self._left_s[payer] / max(cost_s, _LEAST_S)))
        self._left_s[payer] -= num_drafts * cost_s if num_drafts else 0.0
        return num_drafts

    # ---- parts ---------------------------------------------------------------------------------

    def _begin(self, answer: Answer) -> None:
        request = answer.request
        bits = np.zeros(_num_words(request), dtype=np.int32)
        answer.ahead = MaskAhead(
            request.targets.payer,
            len(request.output_token_ids),
            bits,
            partial(self.write_mask, answer, bits),
            lambda: not request.is_done,
            answer.spent_s,
        )
        self._queue.begin(answer.ahead)

    def _take_ahead(
        self, answer: Answer, bits: npt.NDArray[np.int32], failures: dict[str, str]
    ) -> None:
        """Use a mask that was computed beside the steps."""
        ahead, answer.ahead = answer.ahead, None
        assert ahead is not None, "the caller knows"
        answer.cost_s = ahead.cpu_s
        answer.spent_s += ahead.cpu_s
        bits[:] = ahead.bits
        if ahead.failure:
            failures[answer.request.request_id] = ahead.failure

    def write_mask(self, answer: Answer, bits: npt.NDArray[np.int32]) -> None:
        """Advance the answer's position by its new tokens, and write its mask; in any thread."""
        answer.write(bits)

    def _write_at_once(
        self, answer: Answer, bits: npt.NDArray[np.int32], failures: dict[str, str]
    ) -> None:
        """Write its masks: [1 + number of drafts, num_words]."""
        began_s = self._cpu_clock()
        try:
            self.write_mask(answer, bits[0])
            if len(bits) > 1:
                answer.write_ahead(bits[1:])
        except GrammarFailed as error:
            failures[answer.request.request_id] = error.message
        answer.cost_s = (self._cpu_clock() - began_s) / len(bits)

    def _forget_ended(self) -> None:
        """Drop the positions of requests that are done; there is no other notification of that."""
        ended = [i for i, answer in self._answers.items() if answer.request.is_done]
        for request_id in ended:
            del self._answers[request_id]

    def _answer(self, request: Request) -> Answer:
        """Return the request's kept position, or a new one.

        A position kept under the same id for another `Request` object is not used.
        """
        answer = self._answers.get(request.request_id)
        if answer is None or answer.request is not request:
            answer = self._answers[request.request_id] = Answer.of(request)
        return answer

    def _fill(self, rows: list[tuple[Answer, npt.NDArray[np.int32]]]) -> None:
        """Write the masks of all rows. Raises GrammarFailed."""
        failures: dict[str, str] = {}
        later = []
        for row in rows:
            answer, bits = row
            if answer.has_mask():
                self._take_ahead(answer, bits[0], failures)
                if len(bits) > 1:
                    answer.write_ahead(bits[1:])
            elif answer.is_light:
                self._write_at_once(answer, bits, failures)
            else:
                later.append((answer, bits[0]))
        rows = later
        while rows:
            started = [MaskJob(partial(self.write_mask, *row)) for row in rows]
            jobs = {self._threads.submit(job): job for job in started}
            late = wait_for_masks(jobs, self._limits, self._abandon)
            rows, of_jobs = [], rows
            for (future, job), row in zip(jobs.items(), of_jobs, strict=True):
                row[0].cost_s = job.cpu_s
                request_id = row[0].request.request_id
                if future in late:
                    failures[request_id] = self._limits.said
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


def _num_words(request: Request) -> int:
    return -(-grammar_of(request).vocabulary.vocab_size // WORD_BITS)


def _note(future: Future[None], request_id: str, failures: dict[str, str]) -> None:
    error = future.exception()
    if isinstance(error, GrammarFailed):
        failures[request_id] = error.message
    elif error is not None:
        raise error
