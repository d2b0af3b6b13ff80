"""Real nodes: where their threads run, whose weights they share, and how these are quantised."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from aiohttp import ClientSession

from pdserve import _native
from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.commands.cluster.child import Child
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import INT8, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_decoder
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import MODEL, Client
from tests.cluster.fleet import START_S, Fleet, fleet_config, poll, running
from tests.gguf_files import as_gguf
from tests.quantised_files import FORMATS, quantised
from tests.requests import make_request
from tests.unit.engine_model.harness import Node

NUM_OUTPUT = 12


def threads_of(pid: int) -> dict[int, str]:
    """Thread |-> the cores that it may use."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                threads[int(task.name)] = line.split()[1]
    return threads


def packed_maps(pid: int) -> list[tuple[str, ...]]:
    """Device, inode and path of every file of packed weights that is mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [tuple(line.split()[3:]) for line in lines if line.endswith(".packed")]


@pytest.mark.long  # forked nodes stay on their share by default
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
async def test_one_thread_computes_on_its_core_and_all_others_stay_off_it(
    tiny_checkpoint: Path,
) -> None:
    """Not forked, since imports start threads."""
    compute, service = sorted(os.sched_getaffinity(0))[:2]
    engine = {"threads": 1, "cpus": f"{compute},{service}"}
    config = fleet_config(tiny_checkpoint, mode="colocated", engine=engine)
    async with (
        running(Fleet(config, make_child=Child)) as fleet,
        Client(fleet.url) as client,
    ):
        await client.complete(make_prompt(40), NUM_OUTPUT)
        pid = fleet.pid("decode-0")
        threads = threads_of(pid)
    assert threads[pid] == str(service), "the event loop"
    assert sorted(threads.values()).count(str(compute)) == 1, "the engine's thread"
    assert set(threads.values()) == {str(compute), str(service)}


async def test_nodes_stay_on_their_share_and_map_one_copy_of_the_weights(fleet: Fleet) -> None:
    maps = {}
    for name in fleet.node_names:
        plan = fleet._plans[name].config
        assert set(threads_of(fleet.pid(name)).values()) == {plan.engine.cpus}, name
        maps[name] = packed_maps(fleet.pid(name))
    assert len({tuple(mapped) for mapped in maps.values()}) == 1, maps
    assert len(maps["prefill-0"]) == 1


def quantised_tokens(path: Path, prompt: list[int]) -> list[int]:
    """What one process makes of it."""
    checkpoint = resolve_checkpoint(str(path))
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config, form=INT8)
    model = load_decoder(checkpoint, plan, ActivationDtype.FLOAT32, torch.device("cpu"))
    kv_cache = KvCache(config.kv_layout(16, KvDtype.FLOAT32), 64, torch.device("cpu"))
    node = Node(model, kv_cache, ModelRunner(model, kv_cache), list(range(64)))
    request = make_request(prompt)
    node.generate([request], NUM_OUTPUT)
    return request.output_token_ids


@pytest.mark.long  # a quantised checkpoint does by default
async def test_quantised_weights_give_the_same_tokens_over_two_nodes(tiny_checkpoint: Path) -> None:
    prompts = [make_prompt(length) for length in (5, 33, 100)]
    config = fleet_config(tiny_checkpoint, engine={"quantization": "int8"})
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        outputs = [await client.complete(prompt, NUM_OUTPUT) for prompt in prompts]
    assert [o.tokens for o in outputs] == [quantised_tokens(tiny_checkpoint, p) for p in prompts]


@pytest.mark.long  # one node has them by default
async def test_a_gguf_file_gives_the_tokens_of_the_model_it_was_made_of(tmp_path: Path) -> None:
    file = tmp_path / "demo.gguf"
    write_gguf(CHECKPOINT_PATH, file)
    chat = {"model": MODEL, "max_tokens": 24, "temperature": 0}
    chat["messages"] = [{"role": "user", "content": "What is 12 plus 30?"}]
    answers = []
    for model in (file, CHECKPOINT_PATH):
        async with (
            running(Fleet(fleet_config(model))) as fleet,
            ClientSession() as session,
            session.post(f"{fleet.url}/v1/chat/completions", json=chat) as response,
        ):
            answers.append((await response.json())["choices"][0]["message"])
            nodes = (await fleet.status()).nodes
            assert all(node.weights.endswith("computed with as float32") for node in nodes)
            assert all("29 BF16" in node.weights for node in nodes) == (model is file)
    assert answers[0] == answers[1]
    assert "42" in answers[0]["content"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_codes_of_a_gguf_file_give_the_tokens_of_what_they_stand_for(
    dtype: str, tmp_path: Path
) -> None:
    """Handed off, by two ranks a node: the bits are those of one node of two ranks.

    In float32 they are those of the weights that the codes stand for, too. In bfloat16, what codes
    are multiplied with has 8 bits: logprobs differ from those.
    """
    types = {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q5_1", "attn_output": "Q4_1"}
    made, file = shutil.copytree(CHECKPOINT_PATH, tmp_path / "made"), tmp_path / "m.gguf"
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    folder = as_gguf(made, file, lambda name: types.get(name.split(".")[-2], "Q5_0"))
    # One build for all: how long builds take is measured, and a busy machine tells another one.
    build = _native.kernel_variants()[0]
    engine, answers = {"dtype": dtype, "tensor_parallel": 2, "kernels": build}, []
    call = {"model": MODEL, "prompt": make_prompt(100), "max_tokens": 24, "logprobs": 3}
    alone = {"mode": "colocated", "decode": 1}
    for model, mode in ((file, {}), (file, alone), (folder, {})):
        async with (
            running(Fleet(fleet_config(model, engine=engine, **mode))) as fleet,
            ClientSession() as session,
            session.post(f"{fleet.url}/v1/completions", json=call | {"temperature": 0}) as response,
        ):
            answers.append((await response.json())["choices"][0])
            nodes = (await fleet.status()).nodes
            is_coded = ["Q5_1 as 5 bits by 32" in node.weights for node in nodes]
            assert is_coded == [model is file] * len(nodes)
    handed_off, by_one, stood_for = answers
    assert handed_off == by_one
    assert len(handed_off["logprobs"]["tokens"]) > 1
    if dtype == "float32":
        assert handed_off == stood_for
        return
    told, meant = handed_off["logprobs"], stood_for["logprobs"]
    assert told["tokens"] == meant["tokens"]
    assert told["token_logprobs"] == pytest.approx(meant["token_logprobs"], abs=0.05)


@pytest.mark.long  # in one process it does by default
async def test_a_quantised_checkpoint_gives_the_tokens_of_what_its_codes_stand_for(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    plain = quantised(tiny_checkpoint, tmp_path / "q", FORMATS["gptq"])
    prompt, tokens = make_prompt(40), []
    for model in (tmp_path / "q", plain):
        async with running(Fleet(fleet_config(model))) as fleet, Client(fleet.url) as client:
            tokens.append((await client.complete(prompt, NUM_OUTPUT)).tokens)
            nodes = (await fleet.status()).nodes
            assert all(("gptq: 4 bits by 32" in n.weights) == (model is not plain) for n in nodes)
    assert tokens[0] == tokens[1]


@pytest.mark.long  # those of unlike KV do not by default
async def test_nodes_of_unlike_quantisation_do_not_serve_together(tiny_checkpoint: Path) -> None:
    fleet = Fleet(fleet_config(tiny_checkpoint), {"decode-0": ["--quantization=int8"]})

    async def is_refused() -> bool:
        return any("+int8" in line and "weights differ" in line for _, line in fleet.lines)

    try:
        await fleet.spawn()
        await poll(is_refused, START_S, lambda: "nobody was refused")
        assert not (await fleet.status()).ready
    finally:
        await fleet.kill()
