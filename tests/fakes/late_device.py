"""A device that computes a step as late as it may: when somebody waits for it, or for a later one.

Its KV is real: what a step reads is what was last written to its blocks, by whichever request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.request import SampledToken, Scheduled
from pdserve.engine.scheduler import StepRuns
from tests.fakes.runner import PlainRunner, next_token


@dataclass
class LaidOutRow:
    """A row as it was when its step was prepared."""

    request_id: str
    table: list[int]
    begin: int
    tokens: list[int]  # drafts included
    num_drafts: int
    samples: bool


class LateDevice:
    """Implements Launcher."""

    def __init__(self, block_size: int, on_step: Callable[[], None] = lambda: None) -> None:
        self.block_size = block_size
        self.kv: dict[tuple[int, int], int] = {}  # block and offset |-> token
        self.launched: deque[LateStep] = deque()  # and not computed
        self.heard: list[tuple[str, int]] = []  # launches and waits, by the number of the step
        self.rows: list[list[tuple[str, int]]] = []  # of each step
        self.errors: dict[int, Exception] = {}  # step |-> what its result raises
        self.launch_errors: dict[int, Exception] = {}
        self.on_step = on_step
        self.most_ahead = 100  # rows of a step that can run ahead

    def prepare(self, rows: Sequence[Scheduled], progress: LayerProgress | None = None) -> LateStep:
        return LateStep(self, rows, None)

    def write(self, table: Sequence[int], position: int, token: int) -> None:
        self.kv[table[position // self.block_size], position % self.block_size] = token

    def read(self, table: Sequence[int], num_tokens: int) -> list[int]:
        places = (divmod(position, self.block_size) for position in range(num_tokens))
        return [self.kv[table[block], offset] for block, offset in places]


@dataclass
class LateStep:
    """Implements LaunchedStep."""

    device: LateDevice
    scheduled: Sequence[Scheduled]
    before: LateStep | None
    sampled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.number = len(self.device.rows)
        self.device.rows.append(
            [(row.request.request_id, row.num_tokens) for row in self.scheduled]
        )
        self.rows = []
        for request, num_tokens in self.scheduled:
            begin = request.num_computed_tokens
            end = begin + num_tokens
            assert len(request.block_table) * self.device.block_size >= end
            samples = Scheduled(request, num_tokens).samples
            draft = list(request.draft)
            tokens = request.token_slice(begin, end - len(draft)) + draft
            table = list(request.block_table)
            self.rows.append(
                LaidOutRow(request.request_id, table, begin, tokens, len(draft), samples)
            )

    def launch(self) -> None:
        self.device.heard.append(("launch", self.number))
        if error := self.device.launch_errors.get(self.number):
            raise error
        self.device.launched.append(self)

    def result(self) -> list[SampledToken | None]:
        self.device.heard.append(("wait", self.number))
        while self in self.device.launched:
            self.device.launched.popleft().compute()
        if error := self.device.errors.get(self.number):
            raise error
        tokens = map(SampledToken, self.sampled)
        return [
            replace(next(tokens), after=tuple(islice(tokens, row.num_drafts)))
            if row.samples
            else None
            for row in self.rows
        ]

    @property
    def can_be_followed(self) -> bool:
        has_drafts = any(row.num_drafts for row in self.rows)
        return not has_drafts and len(self.rows) <= self.device.most_ahead

    def prepare_next(self, rows: Sequence[Scheduled]) -> LateStep:
        if len(rows) > self.device.most_ahead:
            raise StepRuns
        return LateStep(self.device, rows, self)

    def compute(self) -> None:
        self.device.on_step()
        for row in self.rows:
            for position, token in enumerate(row.tokens, row.begin):
                if token < 0:
                    assert self.before is not None, "it runs ahead of no step"
                    token = self.before.sampled[-1 - token]
                self.device.write(row.table, position, token)
        for row in self.rows:
            if row.samples:
                end = row.begin + len(row.tokens)
                for num_tokens in range(end - row.num_drafts, end + 1):
                    self.sampled.append(next_token(self.device.read(row.table, num_tokens)))


class LateRunner(PlainRunner):
    """A runner on such a device."""

    def __init__(self, device: LateDevice) -> None:
        self.launcher = device
