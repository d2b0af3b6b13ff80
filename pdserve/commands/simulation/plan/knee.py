"""What one node can do at most: batch limit, rates at which it is full, and its KV budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec

from pdserve.commands.bench.compare.cases import CompareCase
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.workload import Sketch
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.predict.deployment import Deployment, Rig
from pdserve.commands.simulation.predict.load import most_tokens
from pdserve.kv.savings import savings
from pdserve.measured.calibration import Calibration
from pdserve.rules.batch import SAFETY

_SAMPLE = 10_000  # requests at most


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one node under this load. Beyond a rate, its queue only grows."""

    prefill_per_s: float  # requests per second that one node can prefill
    other_prefill_per_s: float  # and one with the other weights for prompts; 0: there are none
    decode_per_s: float  # requests per second that one node can decode within the TPOT
    batch: int  # most requests in a decode step within the TPOT
    mean_prompt: float  # tokens
    mean_shared: float  # of these, tokens that an earlier prompt began with, too
    mean_output: float
    kv_token_bytes: int
    kv_tokens: int  # of one node's pool
    kv_concurrency: int  # requests of mean length that the pool holds
    kv_concurrency_longest: int  # and of the longest that the model takes
    weight_bytes: int
    kv_format: str  # advice on it

    def could_serve(self, deployment: Deployment, rate: float) -> bool:
        """Whether the nodes have the time for this rate at all, were it spread evenly.

        In modes where any node does anything, only the sum counts.
        """
        per_s = self.other_prefill_per_s if deployment.prefill_weights else self.prefill_per_s
        for_prompts, for_decodes = rate / per_s, rate / self.decode_per_s
        if deployment.mode == "disaggregated":
            return for_prompts <= deployment.prefill and for_decodes <= deployment.decode
        return for_prompts + for_decodes <= deployment.num_nodes


def knee_of(rig: Rig, case: CompareCase, promise: Promise, count: int) -> Knee:
    """Return the limits that follow from the calibrated times, without any simulation.

    What `count` requests have in common is taken to be in the prefix cache, wherever they go: with
    less than this time for prompts, no cluster serves them.
    """
    calibration, machine = rig.calibration, Machine.of(rig.calibration)
    sketches = list(case.workload.sketched(1.0, min(_SAMPLE, case.whole_decks(count))))
    prompt, output = (fmean(s.num_prompt for s in sketches), fmean(s.num_output for s in sketches))
    perf, context = machine.perf(), round(prompt + output / 2)
    limit_s = SAFETY * promise.tpot_s
    in_pool = _in_pool(machine, max(1, round(prompt + output)))
    most = max(1, min(machine.max_batch_size, in_pool))
    # Step times rise with the batch, so the largest that keeps the limit is found by bisection.
    batch = bisect_right(range(1, most + 1), limit_s, key=lambda b: perf.decode_s(b, b * context))
    batch = max(1, batch)
    shared = list(_shared(sketches, case.workload.block_tokens))

    def prefill_per_s(node: Machine) -> float:
        model = node.perf()
        return 1 / fmean(
            model.prefill_s(s.num_prompt - num_shared, num_shared, node.token_budget)
            for s, num_shared in zip(sketches, shared, strict=True)
        )

    return Knee(
        prefill_per_s=prefill_per_s(machine),
        other_prefill_per_s=prefill_per_s(Machine.of(rig.prefill)) if rig.prefill else 0.0,
        decode_per_s=batch / (max(output, 1.0) * perf.decode_s(batch, batch * context)),
        batch=batch,
        mean_prompt=prompt,
        mean_shared=fmean(shared),
        mean_output=output,
        kv_token_bytes=machine.kv_token_bytes,
        kv_tokens=machine.num_kv_tokens,
        kv_concurrency=in_pool,
        kv_concurrency_longest=_in_pool(machine, most_tokens(calibration)),
        weight_bytes=calibration.shape.weight_bytes,
        kv_format=_format_advice(calibration, batch, context),
    )


def _in_pool(machine: Machine, num_tokens: int) -> int:
    """Streams of so many tokens that a pool holds."""
    return int(machine.num_kv_tokens / machine.layout.held_tokens(num_tokens))


def _format_advice(calibration: Calibration, batch: int, context: int) -> str:
    shape = calibration.shape
    if calibration.device_type != "cpu":
        return f"kept as {shape.dtype}"
    return savings(shape.layout, shape.weight_bytes, batch, context)


def _shared(sketches: Sequence[Sketch], block_tokens: int) -> Iterator[int]:
    """Yield how many tokens of each prompt are those of an earlier one; never all of them."""
    seen: set[int] = set()
    for sketch in sketches:
        num_seen = 0
        while num_seen < len(sketch.blocks) and sketch.blocks[num_seen] in seen:
            num_seen += 1
        seen.update(sketch.blocks)
        yield min(num_seen * block_tokens, sketch.num_prompt - 1)
