"""The prefix store outlives all nodes, and its damage changes no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdserve.settings.config import Mode
from pdserve.settings.prefixes import PrefixConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Output
from tests.cluster.fleet import Fleet, fleet_config, poll, running

PROMPTS = [make_prompt(300, seed) for seed in range(6)]  # 19 blocks each, 18 of them reusable
NUM_BLOCKS = 18 * len(PROMPTS)


def make_fleet(checkpoint: Path, store: Path, mode: Mode) -> Fleet:
    prefix = PrefixConfig(kv_store=str(store), tier_memory="4MiB", prefix_pull="always")
    return Fleet(
        fleet_config(
            checkpoint,
            mode=mode,
            engine={"max_model_len": 384, "kernels": "portable"},
            prefix=prefix,
            timeouts={"prefix_s": 30.0},
        )
    )


async def answers(fleet: Fleet) -> list[Output]:
    async with Client(fleet.url) as client:
        return [await client.complete(prompt, 8) for prompt in PROMPTS]


def flip_bits(store: Path, number: int = 100) -> None:
    """Flip so many bits, anywhere in what the store has."""
    rng = np.random.default_rng(0)
    files = files_in(store)
    for _ in range(number):
        file = files[int(rng.integers(len(files)))]
        data = bytearray(file.read_bytes())
        place = int(rng.integers(8 * len(data)))
        data[place // 8] ^= 1 << place % 8
        file.write_bytes(data)


def files_in(store: Path) -> list[Path]:
    return [path for path in store.glob("_/**/*") if path.is_file()]


async def until_written(store: Path) -> None:
    async def look() -> bool:
        return len(files_in(store)) >= NUM_BLOCKS

    await poll(look, 20.0, lambda: f"{len(files_in(store))} blocks")


async def until_known(fleet: Fleet) -> None:
    for name in fleet.node_names:
        await fleet.wait_for(name, lambda g: g["store_known_blocks"] >= NUM_BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "adaptive"])
async def test_all_nodes_restart_and_compute_little_anew(
    tiny_checkpoint: Path, tmp_path: Path, mode: Mode
) -> None:
    store = tmp_path / "store"
    async with running(make_fleet(tiny_checkpoint, store, mode)) as fleet:
        expected = await answers(fleet)
        await until_written(store)
    async with running(make_fleet(tiny_checkpoint, store, mode)) as fleet:
        await until_known(fleet)
        again = await answers(fleet)
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    assert [one.num_cached_tokens for one in again] == [288] * len(PROMPTS)
    flip_bits(store)
    async with running(make_fleet(tiny_checkpoint, store, mode)) as fleet:
        damaged = await answers(fleet)
        corrupt = sum([(await fleet.gauges(name))["store_corrupt"] for name in fleet.node_names])
    assert [one.token_ids for one in damaged] == [one.token_ids for one in expected]
    assert corrupt > 0
