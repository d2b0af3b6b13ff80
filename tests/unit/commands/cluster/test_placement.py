import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.commands.cluster.placement import (
    assign_cores,
    assign_device,
    coordinator_cores,
    count_gpus,
    has_mps,
    usable_cores,
)
from pdserve.node.start.cores import plan_cores
from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus, parse_cpus
from pdserve.shared.errors import ConfigError

CORES = st.lists(st.integers(0, 300), min_size=1, max_size=64, unique=True).map(sorted)


@given(st.integers(1, 80), CORES)
def test_cores_are_dealt_out_fairly(num_nodes, cores):
    shares = assign_cores(num_nodes, cores)
    assert len(shares) == num_nodes
    if num_nodes <= len(cores):
        assert [core for share in shares for core in share] == cores
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
    else:
        assert all(len(share) == 1 for share in shares)
        uses = [sum(core in share for share in shares) for core in cores]
        assert max(uses) - min(uses) <= 1


@pytest.mark.parametrize(
    ("num_nodes", "cores", "shares"),
    [
        (2, [0, 1], [[0], [1]]),
        (2, [0, 1, 2], [[0], [1, 2]]),
        (1, [4, 5], [[4, 5]]),
        (3, [0, 1], [[0], [1], [0]]),
    ],
)
def test_cores_are_shared_evenly_and_reused_if_there_are_too_few(num_nodes, cores, shares):
    assert assign_cores(num_nodes, cores) == shares


@pytest.mark.parametrize(
    ("num_nodes", "threads", "cores", "expected"),
    [
        (1, 0, [0], [0]),
        (2, 0, [0], [0]),  # more nodes than cores
        (2, 0, [0, 1], [0, 1]),  # no core to spare: no core is better than the others
        (2, 0, [4, 5, 6, 7], [4, 5, 6, 7]),
        (1, 1, [0, 1], [1]),  # services apart from the compute thread
        (2, 1, [0, 1, 2, 3], [1, 3]),
        (2, 1, [0, 1, 2], [2]),  # only the second node has one
        (2, 3, [0, 1, 2, 3], [0, 1, 2, 3]),  # more threads than cores
        (2, 0, range(16), [7, 15]),  # from 8 cores on, a node keeps one for its services
        (2, 0, range(15), [14]),
    ],
)
def test_the_coordinator_keeps_off_compute_cores_if_there_are_others(
    num_nodes, threads, cores, expected
):
    engines = [
        EngineConfig(cpus=format_cpus(share), threads=threads)
        for share in assign_cores(num_nodes, cores)
    ]
    nodes = [plan_cores(engine, cores) for engine in engines]
    assert coordinator_cores(nodes, cores) == expected


def test_devices_go_round_robin_unless_one_was_asked_for():
    assert [assign_device("auto", i, 2) for i in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert assign_device("cuda", 1, 2) == "cuda:1"
    assert [assign_device("auto", i, 5, 2) for i in range(3)] == ["cuda:0", "cuda:2", "cuda:0"]
    assert assign_device("auto", 1, 1, 2) == "cuda:0"  # the node will say what it lacks
    assert assign_device("cuda:1", 0, 2) == "cuda:1"
    assert assign_device("cpu", 0, 2) == "cpu"
    assert assign_device("auto", 0, 0) == "auto"


@given(CORES)
def test_formatted_cores_are_read_back(cores):
    assert parse_cpus(format_cpus(cores)) == cores


def test_format_is_short():
    assert format_cpus([0, 2, 3, 4, 9]) == "0,2-4,9"
    assert format_cpus([]) == ""


def test_usable_cores_follow_the_flag_within_the_affinity():
    allowed = sorted(os.sched_getaffinity(0))
    assert usable_cores("") == allowed
    assert usable_cores(str(allowed[-1])) == [allowed[-1]]
    with pytest.raises(ConfigError, match="may not use core 9999, only"):
        usable_cores("9999")


def test_without_a_driver_there_are_no_gpus_and_nobody_is_asked(tmp_path):
    assert count_gpus([tmp_path / "none"]) == 0


@pytest.mark.parametrize(
    ("code", "num_gpus"), [("print(2)", 2), ("print('?')", 0), ("raise ImportError", 0)]
)
def test_with_a_driver_torch_is_asked_in_another_process(code, num_gpus, tmp_path):
    assert count_gpus([tmp_path / "none", tmp_path], code) == num_gpus


def test_mps_is_where_its_daemon_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not has_mps()
    (tmp_path / "control").touch()
    assert has_mps()
