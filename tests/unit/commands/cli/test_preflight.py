"""What `pdserve up` refuses by itself, before any process is started."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.commands.cli.starting import preflight
from pdserve.commands.cli.starting.preflight import check_cluster
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import Machine
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.model import ModelPlan
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.coding import Coding
from pdserve.node.start.sizing import check_memory
from pdserve.settings.config import EngineConfig
from pdserve.settings.file import load_config
from pdserve.shared.errors import (
    AdapterRefused,
    ConfigError,
    KvBudgetTooSmall,
    ModelError,
    TokenizerError,
)
from pdserve.shared.process.may_pass import NotNow

GIB = 1 << 30


def check(num_gpus: int = 0, **sections: object) -> None:
    config = load_config(ClusterConfig, None, dict(sections))
    check_cluster(config, Machine([0, 1], num_gpus), lambda text: None)


def test_what_would_start_passes():
    check()
    check(engine={"kv_memory": "64MiB", "quantization": "int8"}, decode=3)
    check(2, engine={"device": "cuda:1", "dtype": "float16"})
    check(on="ray", checkpoint={"model": "/only/there"}, engine={"device": "cuda"})


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ({"checkpoint": {"model": "./nowhere"}}, ConfigError, "there is no directory ./nowhere"),
        (
            {"checkpoint": {"adapters": ["a=/nowhere"]}},
            AdapterRefused,
            "/nowhere/adapter_config.json cannot be read",
        ),
        ({"engine": {"device": "cuda"}}, ConfigError, '"cuda": this machine has no usable GPU'),
        ({"engine": {"device": "gpu"}}, ConfigError, "none of auto, cpu, cuda"),
        ({"engine": {"max_model_len": 999_999}}, ConfigError, "more than the model's own"),
        ({"engine": {"dtype": "float16"}}, ConfigError, "dtype float16 is for GPUs"),
        ({"engine": {"kv_memory": "4000TiB"}}, ConfigError, "more than all memory"),
        ({"engine": {"kv_memory": "lots"}}, ConfigError, '"lots" is not a size'),
        ({"engine": {"kv_memory": "1KiB"}}, KvBudgetTooSmall, "raise the budget or lower"),
        ({"engine": {"tensor_parallel": 7}}, ConfigError, "tensor_parallel 7: "),
        ({"mode": "colocated", "prefill": 2}, ConfigError, "leave --prefill out"),
        ({"autoscale": "1:2", "prefill": 3}, ConfigError, "leave prefill and decode out"),
        (
            {"mode": "colocated", "routing": {"rebalance": True}},
            ConfigError,
            "--rebalance needs two pools",
        ),
        ({"routing": {"default_class": "gold"}}, ConfigError, 'default_class "gold" must be'),
        ({"access": {"key_file": "/no/keys.toml"}}, ConfigError, "cannot read the key file"),
        ({"access": {"metrics_token_file": "/t"}}, ConfigError, "metrics token cannot be read"),
        ({"access": {"https_dir": "/no"}}, ConfigError, "access.https_dir: tls.crt"),
        ({"host": "0.0.0.0"}, ConfigError, "without API keys, everyone"),
        ({"access": {"usage_db": "/dev/null/u"}}, ConfigError, "cannot keep usage in /dev/null/u"),
        (
            {"prefix": {"tier_memory": "1GiB"}, "engine": {"prefix_cache": False}},
            ConfigError,
            "without prefix_cache",
        ),
        ({"prefix": {"kv_store": "/dev/null/s"}}, ConfigError, "kv_store '/dev/null/s' cannot be"),
        ({"prefix": {"kv_store": "s3://b/p"}}, ConfigError, "has no end: say kv_store_size"),
        ({"prefix": {"kv_store": "https://b/p"}}, ConfigError, "'https://b/p' cannot be written"),
    ],
)
def test_what_would_not_start_is_refused(sections, error, said):
    with pytest.raises(error, match=said):
        check(**sections)


def test_only_what_may_be_there_is_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreached(*given: object) -> None:
        raise NotNow("the hub cannot be reached")

    monkeypatch.setattr("pdserve.model_files.hub.download", unreached)
    said: list[str] = []
    for model, error in (("/no/where", ConfigError), ("org/name", NotNow)):
        config = load_config(ClusterConfig, None, {"checkpoint": {"model": model}})
        with pytest.raises(error):
            check_cluster(config, Machine([0, 1], 0), said.append)
    assert said == ["looking for org/name on the hub, or in its cache"]


def test_a_hub_that_is_not_reached_may_be_later_for_one_of_several_models_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreached(*given: object) -> int:
        raise NotNow("the hub cannot be reached")

    monkeypatch.setattr(preflight, "_check_model", unreached)
    (tmp_path / "models.toml").write_text("[models.one]\nsource = 'org/one'\n")
    with pytest.raises(NotNow, match=r"models\.toml: models\.one: the hub cannot be reached"):
        check(models=str(tmp_path / "models.toml"))


def test_a_shared_node_holds_the_largest_models_that_it_may_be_asked_for(tmp_path: Path) -> None:
    models = "".join(
        f"[models.{name}]\nsource = '{CHECKPOINT_PATH}'\nmin = {{}}\nmax_model_len = {length}\n"
        for name, length in (("a", 128), ("b", 2048), ("c", 1024))
    )

    def given(memory: str, at_once: int = 2) -> dict[str, str]:
        shared = f"shared = {{ decode = 1, at_once = {at_once}, memory = '{memory}' }}\n"
        (tmp_path / "models.toml").write_text(shared + models)
        return {"models": str(tmp_path / "models.toml"), "mode": "colocated"}

    check(**given("1GiB"))
    with pytest.raises(ConfigError, match=r"c and b take \d+ MiB when .* has 8 MiB: raise shared"):
        check(**given("8MiB"))


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"device": "cuda:2"}, "there are 2 GPUs, the first is cuda:0"),
        ({"quantization": "int8", "dtype": "float32"}, "is for CPUs"),
        ({"tensor_parallel": 4}, "each node takes 4 GPUs, and there are 2"),
    ],
)
def test_gpus_that_are_not_there_are_refused(engine, said):
    with pytest.raises(ConfigError, match=said):
        check(2, engine=engine)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ModelError, "supported are Llama.*take a m"),
        ({"quantization_config": {"quant_method": "hqq"}}, ModelError, r"quantised .*\(hqq\)"),
        ({"final_logit_softcapping": 30.0}, ModelError, "final_logit_softcapping"),
        (None, TokenizerError, "no tokenizer.json"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(change, error, said, tmp_path):
    for file in CHECKPOINT_PATH.iterdir():
        if change is not None or file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | (change or {})))
    with pytest.raises(error, match=said):
        check(checkpoint={"model": str(tmp_path)})


def test_sampling_that_no_request_could_have_is_refused(tmp_path):
    """Only the coordinator reads it, beside nodes that load weights meanwhile."""
    for file in CHECKPOINT_PATH.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature is 'hot'"):
        check(checkpoint={"model": str(tmp_path)})


def machine(root: Path, gib: float) -> Path:
    """The files of a machine with so much memory."""
    (root / "proc").mkdir()
    kilobytes = int(gib * 2**20)
    text = f"MemTotal: {kilobytes} kB\nMemAvailable: {kilobytes} kB\n"
    (root / "proc/meminfo").write_text(text)
    return root


@pytest.mark.parametrize(
    ("engine", "fits", "said"),
    [
        ({}, False, "weights take 14 GiB in bfloat16, and this machine or container has 12 GiB"),
        ({"dtype": "float32"}, False, "weights take 28 GiB in float32"),
        ({"quantization": "int8"}, True, ""),
        ({"quantization": "int8", "kv_memory": "6GiB"}, False, "7 GiB in .* and kv_memory 6 GiB"),
        ({"rank_hosts": ["10.0.0.1:7100"]}, True, ""),
    ],
)
def test_weights_and_kv_have_to_fit_into_memory(engine, fits, said, tmp_path):
    model = load_model_config(resolve_checkpoint(str(CHECKPOINT_PATH)))
    root = machine(tmp_path, 12)
    if fits:
        check_memory(EngineConfig(**engine), model, 14 * GIB, root)
        return
    with pytest.raises(ConfigError, match=said):
        check_memory(EngineConfig(**engine), model, 14 * GIB, root)


def test_codes_count_as_they_are_packed(tmp_path):
    """Not as bfloat16, which would be twice as much."""
    model = load_model_config(resolve_checkpoint(str(CHECKPOINT_PATH)))
    codings = {name: Coding(8, 32, 128) for name in ModelPlan.of(model).expected()}
    engine = EngineConfig(kv_memory="1MiB", max_model_len=64)
    root = machine(tmp_path, 1)
    check_memory(engine, model, 14 * GIB, root, codings)
    huge = replace(model, vocab_size=1 << 23)
    with pytest.raises(ConfigError, match=r"weights take 1\.6 GiB as stored"):
        check_memory(engine, huge, 0, root, codings)


@pytest.mark.long  # its parts are by default
def test_a_bad_model_is_refused_before_any_process_is_started(tmp_path):
    """In one line, by the command itself, which has not loaded torch for it."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    code = (
        "import sys; from pdserve.commands.cli.main import main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "up", "--port=0", "--model", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False\n")
    assert ended.stderr.startswith(f"pdserve up: error: {file} is damaged: it ends at byte 4")
    assert ended.stderr.count("\n") == 1
