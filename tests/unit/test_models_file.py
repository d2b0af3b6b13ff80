"""The file of several models: what it says, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import Machine, cluster_nodes, crowding, plan_cluster
from pdserve.settings.config import CheckpointConfig, EngineConfig, Mode, NodeConfig, WeightsConfig
from pdserve.settings.models import NumNodes, check_alone, node_of_model, read_models
from pdserve.settings.places import PlaceConfig
from pdserve.settings.prices import Price
from pdserve.shared.errors import ConfigError

TWO = """
shared = { decode = 1 }

[models.small]
source = "weights/small"
dtype = "float32"
kv_memory = "8MiB"
aliases = ["gpt-4o-mini"]

[models."org/big"]
source = "org/big"
revision = "v2"
min = { decode = 2 }
tenants = ["payers"]
"""


PLACES = """
shared = { decode = 2, at_once = 2, memory = "1GiB" }
models.a = { source = "x", min = {} }
models.b = { source = "y", min = { decode = 1 } }
"""


def written(folder: Path, text: str) -> str:
    path = folder / "models.toml"
    path.write_text(text)
    return str(path)


def test_models_are_read_with_paths_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights" / "small").mkdir(parents=True)
    file = read_models(written(tmp_path, TWO))
    assert list(file.models) == ["small", "org/big"]
    small, big = file.models.values()
    assert small.source == str(tmp_path / "weights" / "small")
    assert (small.min, big.min) == (NumNodes(prefill=1, decode=1), NumNodes(decode=2))
    assert (big.source, big.revision, big.tenants) == ("org/big", "v2", ["payers"])
    engine = small.engine(EngineConfig(quantization="int8"))
    assert (engine.dtype, engine.quantization, engine.kv_memory) == ("float32", "int8", "8MiB")
    assert file.find("gpt-4o-mini") == ("small", small)


def test_a_node_is_that_of_a_model_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, TWO)
    config = NodeConfig(models=file, checkpoint=WeightsConfig(model="org/big"))
    node, name, others, _ = node_of_model(config)
    assert others == ["small"]
    assert name == "org/big"
    assert node.checkpoint == WeightsConfig(model="org/big", revision="v2")
    assert node_of_model(NodeConfig(models=file)).name == "small"
    assert node_of_model(NodeConfig()).config == NodeConfig()
    with pytest.raises(ConfigError, match="no model 'smal'; did you mean `small`"):
        node_of_model(NodeConfig(models=file, checkpoint=WeightsConfig(model="smal")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[models.a]\nsource = ''", r"models.a: .*length >= 1.*source"),
        ("[models.a]\nsource = 'x'\ncolour = 1", r"models.a: .*unknown field `colour`"),
        ("[models.a]\nsource = 'x'\n[models.a]\nsource = 'y'", "models file .* twice|overwrite"),
        ("[models.a]\nsource = 'x'\naliases = ['b']\n[models.b]\nsource = 'y'", "'b' is a name of"),
        ("[models.a]\nsource = 'x'\naliases = ['a']", "models.a: 'a' is a name twice"),
        ("[models.a]\nsource = 'x'\naliases = ['a b']", "'a b' is no name"),
        ("[models.a]\nsource = 'x'\ndtype = 'int3'", r"models.a: .*int3.*dtype"),
        ("[models.a]\nsource = 'x'\nmin = { decode = -1 }", "models.a: .*min.decode"),
        ("models = {}", "length >= 1"),
        ("[model.a]\nsource = 'x'", "unknown field `model`"),
        ("[models", "cannot read"),
        ("shared = { at_once = 2 }\n[models.a]\nsource = 'x'", "at_once 2: there are 1 models"),
        ("shared = { at_once = 0 }\n[models.a]\nsource = 'x'", r">= 1.*shared.at_once"),
        ("shared = { memory = '1GiB' }\n[models.a]\nsource = 'x'", "memory is for several"),
        (PLACES.replace("1GiB", "0"), "shared.memory 0: models need some"),
        (PLACES.replace("1GiB", "99999999TiB"), r"shared.memory: .* is too large"),
        (PLACES.replace("1GiB", "9" * 400), r"shared.memory: .* is too large"),
        (PLACES.replace("1GiB", "much"), r"shared.memory: \"much\" is not a size"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        read_models(written(tmp_path, text))
    assert "\n" not in told.value.message


def test_no_file() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the models file .*nowhere.toml"):
        read_models("nowhere.toml")


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_the_nodes_of_a_cluster(mode: Mode, tmp_path: Path) -> None:
    config = ClusterConfig(models=written(tmp_path, TWO), mode=mode)
    nodes = cluster_nodes(config)
    decode = [("decode-0", "small"), ("decode-1", "org/big"), ("decode-2", "org/big")]
    expected = [*decode, ("decode-3", "small")]
    if mode == "disaggregated":
        expected.insert(0, ("prefill-0", "small"))
    assert [(node.name, node.model) for node in nodes] == expected
    coordinator, *plans = plan_cluster(config, 1, 2, Machine([0]))
    flags = f"--models={config.models}"
    assert flags in coordinator.arguments
    assert all(flags in plan.arguments for plan in plans)
    assert "--model=org/big" in plans[-2].arguments


def test_the_places_of_shared_nodes_have_their_cores_and_memory_together(tmp_path: Path) -> None:
    config = ClusterConfig(models=written(tmp_path, PLACES), mode="colocated")
    _, *plans = plan_cluster(config, 1, 2, Machine([0, 1, 2]), lambda node: f"/dev/shm/{node}")
    nodes = [plan.config for plan in plans]
    assert all(isinstance(node, NodeConfig) for node in nodes)
    alone, *places = (node for node in nodes if isinstance(node, NodeConfig))
    assert (alone.checkpoint.model, alone.engine.cpus, alone.place) == ("b", "0", PlaceConfig())
    assert [(n.checkpoint.model, n.engine.cpus, n.place.place) for n in places] == [
        ("a", "1", 0),
        ("b", "1", 1),
        ("a", "2", 0),
        ("b", "2", 1),
    ]
    assert {(n.place.place_of, n.place.ledger, n.place.memory) for n in places} == {
        (f"shared-decode-{i}", f"/dev/shm/shared-decode-{i}", str(1 << 30)) for i in range(2)
    }
    assert crowding(plans, [0, 1, 2], has_mps=False) == "", "their steps take turns"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine": EngineConfig(tensor_parallel=2)}, "tensor_parallel: not where"),
        ({"engine": EngineConfig(device="cuda:0")}, "device: not where"),
        ({"engine": EngineConfig(kv_commit=True)}, "kv_commit: not where"),
        ({"mode": "multiplexed"}, "multiplexed: not where"),
    ],
)
def test_what_cannot_share_a_node_is_refused(given: Any, says: str, tmp_path: Path) -> None:
    config = ClusterConfig(models=written(tmp_path, PLACES), **{"mode": "colocated"} | given)
    with pytest.raises(ConfigError, match=says):
        plan_cluster(config, 1, 2, Machine(list(range(8))))


def test_a_pool_that_no_model_has_nodes_of(tmp_path: Path) -> None:
    file = written(tmp_path, "[models.a]\nsource = 'x'\nmin = { decode = 1 }")
    with pytest.raises(ConfigError, match="there is no prefill node"):
        cluster_nodes(ClusterConfig(models=file))
    assert len(cluster_nodes(ClusterConfig(models=file, mode="colocated"))) == 1


def test_what_the_file_says_is_not_said_by_flags() -> None:
    for config in (CheckpointConfig(model="x"), CheckpointConfig(served_model_name="x")):
        with pytest.raises(ConfigError, match="--models file with --"):
            check_alone("file", config)
    for flags in ({"prefill": 2}, {"decode": 2}, {"autoscale": "1:2"}, {"on": "ray"}):
        with pytest.raises(ValueError, match="not beside models"):
            ClusterConfig(models="file", **flags)  # type: ignore[arg-type]


CASCADE = """
[cascades.auto]
aliases = ["best"]
tiers = [{ model = "gpt-4o-mini", escalate = { mean_logprob = -0.7 } }, { model = "org/big" }]
"""

CLOUD = """
[external.cloud]
url = "https://api.example.com/v1"
model = "large-1"
key_file = "cloud.key"
price = { input = 2.0, output = 8.0 }
"""


def test_a_cascade_names_models_of_the_file(tmp_path: Path) -> None:
    cascade = read_models(written(tmp_path, TWO + CASCADE)).cascades["auto"]
    assert [tier.name for tier in cascade.tiers] == ["gpt-4o-mini", "org/big"]
    assert cascade.needs_whole_answer


@pytest.mark.parametrize(
    ("cascade", "said"),
    [
        ("", "cascades.c: Object missing required field `tiers`"),
        ("tiers = []", "cascades.c: Expected `array` of length >= 2"),
        ("tiers = [{ model = 'small', escalate = { tool = true } }, { model = 'smal' }]",
         "cascades.c: tier 2: there is no model 'smal'; did you mean `small`?"),
        ("tiers = [{ model = 'auto', escalate = { tool = true } }, { model = 'small' }]",
         "cascades.c: tier 1: 'auto' is a cascade itself"),
        ("tiers = [{ model = 'c', escalate = { tool = true } }, { model = 'small' }]",
         "cascades.c: tier 1: 'c' is a cascade itself"),
        ("tiers = [{ model = 'small' }, { model = 'org/big' }]",
         "cascades.c: tier 1: 'escalate' has to say when"),
        ("tiers = [{ model = 'small', escalate = { first_tokens = 3 } }, { model = 'org/big' }]",
         "cascades.c: tier 1: 'escalate' has to say when"),
        ("tiers = [{ escalate = { tool = true } }, { model = 'small' }]",
         "cascades.c: tier 1: give one of 'model', 'adapter' and 'external'"),
        ("tiers = [{ model = 'small', escalate = { tool = true } }, { external = 'clod' }]",
         "cascades.c: tier 2: there is no [external.clod]; did you mean `cloud`?"),
        ("tiers = [{ external = 'cloud', escalate = { tool = true } }, { model = 'small' }]",
         "cascades.c: tier 1: only the last one can be 'external'"),
        ("tiers = [{ model = 'small', escalate = { tool = true } }, { model = 'small' }]",
         "cascades.c: tier 2: 'small' is a tier before already"),
        ("aliases = ['best']\ntiers = [{ model = 'small', escalate = { tool = true } }, "
         "{ model = 'org/big' }]", "cascades.c: 'best' is a name of cascades.auto, too"),
        ("aliases = ['small']\ntiers = [{ model = 'small', escalate = { tool = true } }, "
         "{ model = 'org/big' }]", "cascades.c: 'small' is a name of models.small, too"),
        ("tiers = [{ model = 'small', escalate = { mean = 1.0 } }, { model = 'org/big' }]",
         "unknown field `mean`"),
    ],
)  # fmt: skip
def test_a_wrong_cascade_gets_one_line(tmp_path: Path, cascade: str, said: str) -> None:
    file = written(tmp_path, TWO + CASCADE + CLOUD + f"[cascades.c]\n{cascade}\n")
    with pytest.raises(ConfigError) as caught:
        read_models(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_elsewhere_has_its_key_in_a_file_beside(tmp_path: Path) -> None:
    cloud = read_models(written(tmp_path, TWO + CLOUD)).external["cloud"]
    with pytest.raises(ConfigError, match=r"cannot read the key file .*/cloud\.key"):
        cloud.key()
    (tmp_path / "cloud.key").write_text("a b\n")
    with pytest.raises(ConfigError, match="the key alone"):
        cloud.key()
    (tmp_path / "cloud.key").write_text("sk-1\n")
    assert cloud.key() == "sk-1"
    assert cloud.price == Price(input=2.0, output=8.0)
    assert cloud.price.of(1000, 400, 100) == pytest.approx(0.0028)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("https", "http", "external.cloud: url: a key is only sent to https://"),
        ("https://", "", "external.cloud: url: "),
        ("external.cloud", "external.small", "'small' is a name of models.small, too"),
        ("input", "inputs", "external.cloud: Object contains unknown field `inputs`"),
    ],
)
def test_a_wrong_server_elsewhere_gets_one_line(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_models(written(tmp_path, TWO + CLOUD.replace(before, after, 1)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
