"""What one node can do at most: batch limit, rates at which it is full, and its KV budget."""

from __future__ import annotations

from bisect import bisect_right
from statistics import fmean

import msgspec

from pdserve.batch_rule import SAFETY
from pdserve.bench.compare.cases import CompareCase
from pdserve.bench.load.outcome import Promise
from pdserve.simulation.machine import Machine
from pdserve.simulation.predict.deployment import Deployment, Rig
from pdserve.simulation.predict.load import most_tokens

_SAMPLE = 200  # requests


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one node under this load. Beyond a rate, its queue only grows."""

    prefill_per_s: float  # requests per second that one node can prefill
    decode_per_s: float  # requests per second that one node can decode within the TPOT
    batch: int  # most requests in a decode step within the TPOT
    mean_prompt: float  # tokens
    mean_output: float
    kv_token_bytes: int
    kv_tokens: int  # of one node's pool
    kv_concurrency: int  # requests of mean length that the pool holds
    kv_concurrency_longest: int  # and of the longest that the model takes
    weight_bytes: int

    def could_serve(self, deployment: Deployment, rate: float) -> bool:
        """Whether the nodes have the time for this rate at all, were it spread evenly.

        In modes where any node does anything, only the sum counts.
        """
        for_prompts, for_decodes = rate / self.prefill_per_s, rate / self.decode_per_s
        if deployment.mode == "disaggregated":
            return for_prompts <= deployment.prefill and for_decodes <= deployment.decode
        return for_prompts + for_decodes <= deployment.num_nodes


def knee_of(rig: Rig, case: CompareCase, promise: Promise) -> Knee:
    """Return the limits that follow from the calibrated times, without any simulation."""
    calibration, machine = rig.calibration, Machine.of(rig.calibration)
    sketches = list(case.workload.sketched(1.0, case.whole_decks(_SAMPLE)))
    prompt, output = (fmean(s.num_prompt for s in sketches), fmean(s.num_output for s in sketches))
    perf, context = machine.perf(), round(prompt + output / 2)
    limit_s = SAFETY * promise.tpot_s
    in_pool = machine.num_kv_tokens // max(1, round(prompt + output))
    most = max(1, min(machine.max_batch_size, in_pool))
    # Step times rise with the batch, so the largest that keeps the limit is found by bisection.
    batch = bisect_right(range(1, most + 1), limit_s, key=lambda b: perf.decode_s(b, b * context))
    batch = max(1, batch)
    prefill_s = fmean(perf.prefill_s(s.num_prompt, 0, machine.token_budget) for s in sketches)
    return Knee(
        prefill_per_s=1 / prefill_s,
        decode_per_s=batch / (max(output, 1.0) * perf.decode_s(batch, batch * context)),
        batch=batch,
        mean_prompt=prompt,
        mean_output=output,
        kv_token_bytes=machine.kv_token_bytes,
        kv_tokens=machine.num_kv_tokens,
        kv_concurrency=in_pool,
        kv_concurrency_longest=machine.num_kv_tokens // most_tokens(calibration),
        weight_bytes=calibration.shape.weight_bytes,
    )
