import pytest
from msgspec.structs import replace

from pdserve.commands.cli.main import build_parser
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import Machine, crowding, plan_cluster, planned_again
from pdserve.protocol.status import AbsentNode, ClusterStatus, CoordinatorStatus
from pdserve.settings.config import CheckpointConfig, EngineConfig
from pdserve.settings.flags import config_from
from pdserve.settings.timeouts import Timeouts
from pdserve.shared.errors import ConfigError
from tests.fakes.statuses import node_status


def plan(config: ClusterConfig, machine: Machine | None = None):
    return plan_cluster(config, 8000, 8001, machine or Machine(cores=[0, 1, 2, 3]))


def test_a_cluster_has_its_coordinator_then_prefill_then_decode_nodes():
    plans = plan(ClusterConfig(prefill=2, decode=2))
    assert [p.name for p in plans] == [
        "coordinator",
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    ]
    assert [p.config.node_id for p in plans[1:]] == [p.name for p in plans[1:]]
    assert {tuple(p.config.coordinators) for p in plans[1:]} == {("127.0.0.1:8001",)}


def test_nodes_share_the_cores_and_see_for_themselves_how_many_threads_that_makes():
    engines = [p.config.engine for p in plan(ClusterConfig(decode=2))[1:]]
    assert [e.cpus for e in engines] == ["0", "1", "2-3"]
    assert [e.threads for e in engines] == [0, 0, 0]


def test_the_coordinator_is_told_its_cores():
    assert plan(ClusterConfig())[0].config.cpus == "0-3"
    spared = ClusterConfig(engine=EngineConfig(threads=1))
    assert plan(spared)[0].config.cpus == "1,3"


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_pools_that_scale_help_each_other_where_there_are_two(mode):
    coordinator = plan(ClusterConfig(mode=mode, autoscale="1:2"))[0].config
    assert coordinator.routing.rebalance is (mode != "colocated")


@pytest.mark.parametrize(
    ("was", "beside", "expected"),
    [
        ("c", "b", "c"),
        ("c", "c", "a"),  # it has woken there meanwhile
        ("", "b", "a"),  # it was not ready
        ("", "a", "b"),
        ("gone", "b", "a"),  # the file has changed
    ],
)
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_place_starts_again_as_what_it_was(tmp_path, was, beside, expected, is_noticed):
    file = tmp_path / "models.toml"
    shared = 'shared = { decode = 1, at_once = 2, memory = "1MiB" }\n'
    file.write_text(shared + "".join(f'[models.{m}]\nsource = "{m}"\nmin = {{}}\n' for m in "abc"))
    plans = plan(ClusterConfig(mode="colocated", models=str(file)))
    assert [p.config.checkpoint.model for p in plans[1:]] == ["a", "b"]
    place_of = plans[1].config.place.place_of
    other = replace(node_status("decode-1", "decode"), model=beside, place_of=place_of)
    same = replace(node_status("decode-0", "decode"), model=was, place_of=place_of)
    absent = AbsentNode(node_id="decode-0", absence="lost", reason="r", since_s=1.0, model=was)
    status = ClusterStatus(
        model="a, b, c",
        mode="colocated",
        ready=True,
        inflight=0,
        waiting=0,
        nodes=[other] if is_noticed else [same, other],
        coordinator=CoordinatorStatus(absent=[absent] if is_noticed else []),
    )
    again = planned_again(plans[1], status)
    assert again.config.checkpoint.model == expected
    assert replace(again.config, checkpoint=plans[1].config.checkpoint) == plans[1].config
    assert planned_again(plans[0], status) is plans[0]


def test_too_few_cores_are_said_with_numbers():
    cores = [4, 6, 7]
    plans = plan(ClusterConfig(prefill=2, decode=2), Machine(cores))
    assert "4 nodes compute with 4 threads on 3 cores" in crowding(plans, cores, has_mps=False)
    threads = EngineConfig(threads=2)
    plans = plan(ClusterConfig(engine=threads), Machine(cores))
    assert "2 nodes compute with 4 threads on 3 cores" in crowding(plans, cores, has_mps=False)
    assert crowding(plan(ClusterConfig(), Machine(cores)), cores, has_mps=False) == ""
    gpus = Machine(cores, num_gpus=4)
    plans = plan(ClusterConfig(prefill=2, decode=2), gpus)
    assert crowding(plans, cores, has_mps=False) == ""


def test_threads_that_were_asked_for_stay():
    engines = [p.config.engine for p in plan(ClusterConfig(engine=EngineConfig(threads=3)))[1:]]
    assert [e.threads for e in engines] == [3, 3]


def test_nodes_on_one_gpu_share_its_memory_and_need_mps():
    cores = [0, 1]
    plans = plan(ClusterConfig(decode=2), Machine(cores, num_gpus=2))
    shares = [p.config.engine.kv_utilization for p in plans[1:]]
    assert shares == [0.45, 0.9, 0.45]
    assert "2 nodes on cuda:0, and no MPS" in crowding(plans, cores, has_mps=False)
    assert crowding(plans, cores, has_mps=True) == ""


def test_gpus_go_round_robin():
    plans = plan(ClusterConfig(decode=2), Machine(cores=[0, 1], num_gpus=2))
    assert [p.config.engine.device for p in plans[1:]] == ["cuda:0", "cuda:1", "cuda:0"]


def test_co_located_has_no_prefill_node():
    plans = plan(ClusterConfig(mode="colocated", decode=2))
    assert [p.name for p in plans] == ["coordinator", "decode-0", "decode-1"]
    assert plans[0].config.mode == "colocated"


@pytest.mark.parametrize(
    ("mode", "prefill", "complaint"),
    [("colocated", 1, "leave --prefill out"), ("disaggregated", 0, "needs prefill nodes")],
)
def test_a_number_of_prefill_nodes_that_contradicts_the_mode(mode, prefill, complaint):
    with pytest.raises(ConfigError, match=complaint):
        plan(ClusterConfig(mode=mode, prefill=prefill))


@pytest.mark.parametrize(
    ("host", "nodes_host", "address"),
    [
        ("0.0.0.0", "127.0.0.1", "127.0.0.1:8001"),
        ("10.0.0.7", "127.0.0.1", "127.0.0.1:8001"),
        ("::", "::1", "[::1]:8001"),
    ],
)
def test_clients_may_come_from_anywhere_but_nodes_only_from_here(host, nodes_host, address):
    coordinator, node, *_ = plan(ClusterConfig(host=host))
    assert coordinator.config.host == host
    assert coordinator.config.nodes_host == nodes_host
    assert node.config.coordinators == [address]


def test_the_command_line_of_each_process_gives_its_config_back():
    config = ClusterConfig(
        decode=3,
        checkpoint=CheckpointConfig(model="/models/a b", served_model_name="ab"),
        engine=EngineConfig(kv_memory="1GiB", prefix_cache=False, block_size=32),
        timeouts=Timeouts(liveness_s=1.5),
        transports=["tcp"],
    )
    for process in plan(config):
        arguments = build_parser().parse_args(process.arguments)
        assert config_from(type(process.config), arguments) == process.config


# ---- multiplexed: nodes that split their cores ---------------------------------------------------


def multiplexed(machine: Machine, **fields):
    return plan(ClusterConfig(mode="multiplexed", **fields), machine)[1:]


def test_each_node_computes_both_phases_on_its_cores():
    nodes = [p.config for p in multiplexed(Machine([0, 1, 2, 3, 4]), decode=2)]
    assert [n.node_id for n in nodes] == ["decode-0", "decode-1"]
    assert [n.engine.cpus for n in nodes] == ["0-1", "2-4"]
    assert [n.multiplexed for n in nodes] == [True, True]
    assert [p.config.multiplexed for p in plan(ClusterConfig())[1:]] == [False, False]


def test_what_cannot_be_split_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="each of 2 nodes needs two or more, and there are 3"):
        multiplexed(Machine([0, 1, 2]), decode=2)
    with pytest.raises(ConfigError, match="would compute on cuda:0: add --device cpu"):
        multiplexed(Machine([0, 1], num_gpus=1))
    multiplexed(Machine([0, 1], num_gpus=1), engine=EngineConfig(device="cpu"))
    with pytest.raises(ConfigError, match=r"--prefill 1 with --mode multiplexed: .*leave"):
        multiplexed(Machine([0, 1, 2, 3]), prefill=1)


def test_nodes_of_several_ranks_are_refused():
    flags = ["--set", "engine.tensor_parallel=2"]
    arguments = build_parser().parse_args(["up", "--mode", "multiplexed", *flags])
    with pytest.raises(ConfigError, match="tensor_parallel: not in mode multiplexed"):
        config_from(ClusterConfig, arguments)
