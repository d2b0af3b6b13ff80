"""One tenant attacks, another is served: the short form of `pdserve bench neighbours`.

Nothing is timed here: the neighbour's calls finish, and everything is freed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.commands.bench.neighbours.attacks import ATTACKS
from pdserve.commands.bench.neighbours.measurement import (
    ALL,
    NeighboursReport,
    SharedCluster,
    measure_neighbours,
)
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.settings.access import AccessConfig, hash_key
from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet, fleet_config, running

SHOWN = ["frames", "logprobs", "long-texts", "leavers", "flood", "generated"]
ROUND_S, RATE = 0.5, 8.0


@pytest.mark.long
async def test_what_one_tenant_does_fails_no_call_of_another(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.toml"
    key_file.write_text(
        "".join(f'[tenants.{n}]\nkeys = ["{hash_key(n)}"]\n' for n in ("neighbour", "attacker"))
    )
    config = fleet_config(
        CHECKPOINT_PATH, access=AccessConfig(key_file=str(key_file), readers="anybody")
    )
    report = NeighboursReport()
    async with running(Fleet(config)) as fleet:
        target = SharedCluster(
            fleet.url, MODEL, 2048, "neighbour", "attacker", fleet.assert_baseline
        )
        await measure_neighbours(target, SHOWN, RATE, ROUND_S, report, print)
    attacked = report.row(ALL)
    assert attacked is not None
    assert attacked.calls == round(RATE * ROUND_S) * len(SHOWN)
    assert not any(row.not_finished for row in report.rows), report.rows


def test_there_is_an_attack_for_each_kind_of_bound() -> None:
    assert {*SHOWN} <= {*ATTACKS}
    assert all(attack.text and attack.width > 0 for attack in ATTACKS.values())
