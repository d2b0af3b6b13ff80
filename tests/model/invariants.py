"""What must hold in every world."""

from __future__ import annotations

from kv_transfer.lifecycle import PullerState
from tests.model.world import (
    NUM_PROMPT_BLOCKS,
    REQUESTS,
    Config,
    Phase,
    Violation,
    World,
)


def check(world: World, config: Config) -> None:
    """Every block that somebody relies on holds what he relies on.

    Raises:
        Violation: names block and holder.
    """
    _check_exporter(world, config)
    _check_puller(world, config)


def _check_exporter(world: World, config: Config) -> None:
    exporter = world.exporter
    if not exporter.is_up:
        return
    cells = world.memories[-1].cells
    for request in REQUESTS:
        leg, handoff = exporter.legs[request], exporter.handoffs[request]
        tables = [(step, leg.table) for step in range(leg.num_steps)]
        for number, table in tables:
            step = config.steps[number]
            for index in range(step.first_block, step.end_block):
                for layer in range(step.first_layer, step.end_layer):
                    if cells[table[index]][layer] != config.datum(request, index):
                        raise Violation(f"the exporter's live block {index} of {request} is wrong")
        for ticket in handoff.said if handoff is not None else ():
            step = config.steps[ticket.step]
            for block_id, index in zip(
                ticket.block_ids, range(step.first_block, step.end_block), strict=True
            ):
                for layer in range(step.first_layer, step.end_layer):
                    if cells[block_id][layer] != config.datum(request, index):
                        raise Violation(f"announced block {index} of {request} has changed")
    for block_id, block_hash in exporter.pool.hash_of:
        if cells[block_id] != tuple(block_hash) * config.num_layers:
            raise Violation("the exporter's prefix cache holds a wrong block")


def _check_puller(world: World, config: Config) -> None:
    puller = world.puller
    for request, intake in enumerate(puller.intakes):
        for index in range(min(NUM_PROMPT_BLOCKS, len(intake.table))):
            is_read = intake.states[index] is PullerState.VALID or intake.phase is Phase.HELD
            row = puller.cells[intake.table[index]]
            expected = (config.datum(request, index),) * config.num_layers
            if is_read and row != expected:
                what = "adopted" if intake.phase is Phase.HELD else "validated"
                raise Violation(f"block {index} of {request} was {what}, and holds {row}")
    for block_id, block_hash in puller.pool.hash_of:
        if puller.cells[block_id] != tuple(block_hash) * config.num_layers:
            raise Violation("the puller's prefix cache holds a wrong block")
