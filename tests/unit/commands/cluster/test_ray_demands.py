"""What nodes ask Ray for, and what they take of their machines."""

import pytest

from pdserve.commands.cluster.on_ray.demands import (
    RayDemand,
    check_no_places,
    check_splits,
    demand,
    fitted,
)
from pdserve.commands.cluster.plan import PlannedNode
from pdserve.settings.config import EngineConfig
from pdserve.shared.errors import ConfigError

HEAD = {"CPU": 0.0, "memory": 8e9}
SIXTEEN = {"CPU": 16.0, "memory": 64e9}
EIGHT_AND_GPUS = {"CPU": 8.0, "GPU": 4.0}


def test_nodes_are_spread_over_the_machines_and_share_them_evenly():
    def cpus(num_nodes: int, *machines: dict[str, float]) -> int:
        return demand(EngineConfig(), num_nodes, machines).cpus

    assert cpus(2, HEAD, SIXTEEN, SIXTEEN) == 16
    assert cpus(3, HEAD, SIXTEEN, SIXTEEN) == 8
    assert cpus(2, SIXTEEN, EIGHT_AND_GPUS) == 8
    assert cpus(40, SIXTEEN) == 1


def test_what_the_config_says_is_asked_for():
    engine = EngineConfig(threads=3, kv_memory="2GiB", device="cpu")
    asked = demand(engine, 2, [EIGHT_AND_GPUS])
    assert asked == RayDemand(cpus=3, gpus=0, memory_bytes=2 * 1024**3)
    assert asked.bundle == {"CPU": 3.0, "memory": 2.0 * 1024**3}


def test_each_node_gets_a_gpu_where_there_are_any():
    assert demand(EngineConfig(), 4, [EIGHT_AND_GPUS]).bundle == {"CPU": 2.0, "GPU": 1.0}
    assert demand(EngineConfig(device="cuda"), 1, [SIXTEEN]).gpus == 1
    assert demand(EngineConfig(), 1, [SIXTEEN]).gpus == 0
    staged = EngineConfig(device="cuda", tensor_parallel=2, pipeline_parallel=3)
    assert demand(staged, 1, [SIXTEEN]).gpus == 6


@pytest.mark.parametrize("engine", [EngineConfig(cpus="0-3"), EngineConfig(device="cuda:1")])
def test_what_ray_chooses_is_refused(engine):
    with pytest.raises(ConfigError, match="leave cpus and cuda:N out"):
        demand(engine, 1, [SIXTEEN])


def test_machines_without_cpus_are_told():
    with pytest.raises(ConfigError, match="no machine of the Ray cluster has a CPU"):
        demand(EngineConfig(), 1, [HEAD])


def test_nodes_of_one_machine_have_cores_of_their_own():
    asked = RayDemand(cpus=2, gpus=0, memory_bytes=0)
    cores = [0, 1, 4, 5, 6]
    assert fitted(asked, 0, cores) == ["--cpus=0-1", "--device=cpu"]
    assert fitted(asked, 1, cores) == ["--cpus=4-5", "--device=cpu"]
    assert fitted(asked, 2, cores) == ["--cpus=0,6", "--device=cpu"]  # Ray counts more than five
    assert fitted(RayDemand(8, 1, 0), 1, [0, 1]) == ["--cpus=0-1", "--device=cuda:0"]


def test_only_nodes_with_two_cores_can_split_them():
    check_splits(RayDemand(cpus=2, gpus=0, memory_bytes=0))
    with pytest.raises(ConfigError, match="would have 1 CPUs and 0 GPUs: ask for --threads 2"):
        check_splits(RayDemand(cpus=1, gpus=0, memory_bytes=0))


def test_actors_are_no_places_of_one_node():
    check_no_places([PlannedNode("decode-0", "decode", "a")])
    with pytest.raises(ConfigError, match=r"shared\.at_once: with --on ray"):
        check_no_places([PlannedNode("decode-0", "decode", "a", "shared-decode-0")])
