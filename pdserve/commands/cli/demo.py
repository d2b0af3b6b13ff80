"""`pdserve demo`: starts a cluster, asks it some questions, and stops it again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.commands.cli.chat import Answer, ask
from pdserve.commands.cli.demo_config import DemoConfig
from pdserve.commands.cli.starting.forked import Makes, begin_forking
from pdserve.commands.cli.starting.preflight import check_cluster
from pdserve.commands.cli.starting.up_screen import UpScreen
from pdserve.commands.cli.up import Check, finishes_before, wait_ready
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import count_gpus, usable_cores
from pdserve.commands.cluster.plan import Machine
from pdserve.commands.cluster.scrape import Samples, scrape
from pdserve.commands.cluster.supervisor import OWN_COMMAND, Cluster
from pdserve.demo_model import CHECKPOINT_PATH
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.model_files.tokenizer import read_tokenizer
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.errors import ClusterError, DeadlineExceeded, PdserveError
from pdserve.shared.process.exit_codes import FORCED, OK
from pdserve.shared.process.signals import StopSignals


def run(
    config: DemoConfig, command: Sequence[str] = OWN_COMMAND, check: Check = check_cluster
) -> int:
    """Run the demo; the exit code.

    Raises:
        PdserveError: any part of it failed, or the deadline passed.
    """
    screen = UpScreen()
    served = ClusterConfig(
        port=0, start_s=config.deadline_s, checkpoint=config.checkpoint, engine=config.engine
    )
    machine = Machine(usable_cores(config.engine.cpus), count_gpus())
    makes = begin_forking(command)
    try:
        check(served, machine, screen.say)
        return asyncio.run(_demo(config, served, screen, command, makes))
    finally:
        screen.finish()


async def _demo(
    config: DemoConfig,
    served: ClusterConfig,
    screen: UpScreen,
    command: Sequence[str],
    makes: Makes,
) -> int:
    make_child, before_nodes = makes
    written: list[tuple[str, str]] = []  # output of the children, shown if something fails
    cluster = Cluster(
        served,
        on_line=lambda name, line: written.append((name, line)),
        command=command,
        make_child=make_child,
        before_nodes=before_nodes,
    )
    signals = StopSignals()
    try:
        done = await finishes_before(signals.drain, _within_deadline(config, cluster, screen))
    except PdserveError:
        for name, line in written:
            screen.line(name, line)
        raise
    finally:
        await cluster.kill()
    return OK if done else FORCED


async def _within_deadline(config: DemoConfig, cluster: Cluster, screen: UpScreen) -> None:
    try:
        async with asyncio.timeout(config.deadline_s):
            await _converse(config, cluster, screen)
    except TimeoutError as error:
        limit = f"{config.deadline_s:g} s (--deadline-s)"
        raise DeadlineExceeded(f"the demo was not over after {limit}") from error


async def _converse(config: DemoConfig, cluster: Cluster, screen: UpScreen) -> None:
    await cluster.spawn()
    await wait_ready(cluster, screen)
    model = (await cluster.status()).model
    print(f"{model} on a coordinator, a prefill node and a decode node at {cluster.url}\n")
    is_chat = await asyncio.to_thread(_answers_chats, config.checkpoint)
    if not is_chat:
        print("it has no chat template: it goes on with each prompt instead of answering it\n")
    for prompt in config.prompts:
        print(f"> {prompt}", flush=True)
        answer = await ask(cluster.url, model, prompt, config.max_tokens, _show, is_chat)
        print(f"\n{facts(answer)}\n", flush=True)
    await _print_pulls(cluster)
    for end in await cluster.stop():
        if end.returncode != 0:
            raise ClusterError(f"{end.name} ended with {end.account}")
    print("everything is stopped again")


def _answers_chats(named: CheckpointConfig) -> bool:
    """Whether the model has a chat template; its files are here, since nodes have loaded them."""
    from coordinator.text.checkpoint import load_chat_templates

    checkpoint = resolve_checkpoint(named.model or str(CHECKPOINT_PATH), named.revision)
    _, config = read_tokenizer(checkpoint.path)
    return bool(load_chat_templates(checkpoint.path, config))


def facts(answer: Answer) -> str:
    """One line with latencies, token counts and nodes of an answer."""
    parts = [f"TTFT {answer.ttft_s * 1e3:.1f} ms"]
    if answer.tpot_s is not None:
        parts.append(f"TPOT {answer.tpot_s * 1e3:.2f} ms")
    parts.append(f"{answer.prompt_tokens} + {answer.output_tokens} tokens")
    parts.append(f"prefilled on {answer.prefill_node}, decoded on {answer.decode_node}")
    return f"  [{' | '.join(parts)}]"


async def _print_pulls(cluster: Cluster) -> None:
    for name, address in (await cluster.metrics_addresses()).items():
        pulls = await fetch_pulls(address)
        if pulls.num_bytes > 0:
            print(
                f"{name} pulled {pulls.num_bytes / 2**10:.0f} KiB of KV in {pulls.num_pulls} pulls "
                f"({pulls.seconds * 1e3:.1f} ms)"
            )


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass(frozen=True)
class PullMetrics:
    """The complete pulls of a node since its start."""

    num_pulls: int
    num_bytes: int
    seconds: float


async def fetch_pulls(metrics_address: str) -> PullMetrics:
    """Read the metrics of the node at `metrics_address`.

    Raises:
        ClusterError: it does not answer.
    """
    return pulls_in(await scrape(metrics_address))


def pulls_in(samples: Samples) -> PullMetrics:
    """The pulls in a node's metrics; 0 for missing samples."""
    values = samples.values
    return PullMetrics(
        num_pulls=int(values.get("pdserve_pulls_total", 0)),
        num_bytes=int(values.get("pdserve_pulled_bytes_total", 0)),
        seconds=values.get("pdserve_pull_seconds_total", 0.0),
    )
