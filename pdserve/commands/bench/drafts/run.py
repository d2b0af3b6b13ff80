"""`pdserve bench drafts`: runs a model in this process, with drafts and without, in turns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rich.table import Table

from coordinator.text import Tokenizer
from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.drafts.config import DraftsBenchConfig
from pdserve.commands.bench.drafts.measurement import Case, DraftsReport, DraftsRow, lookup
from pdserve.commands.bench.drafts.streams import Streams
from pdserve.commands.bench.drafts.texts import MOST_PROMPT, make_texts
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.engine.drafts.source import Source
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.drafts.texts import FormerAnswers, OwnText
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.measured.perf_model import PerfModel
from pdserve.node.profiling.costs import step_costs
from pdserve.node.start.model import NodeModel, load_runner, packed_cache, plan_model, use_cores
from pdserve.settings.config import CheckpointConfig, NodeConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK

_TEXTS_A_BATCH = 2  # of different texts; the rounds take them in turn


def run(config: DraftsBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the model cannot be used, or drafts have changed an answer.
    """
    report = DraftsReport(_measure(config), [lookup(history) for history in config.histories])
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report), _lookup_table(report)], [machine_and_date(setup)])
    return OK


def _measure(config: DraftsBenchConfig) -> list[DraftsRow]:
    checkpoint = CheckpointConfig(model=checkpoint_of(config.shape))
    node = NodeConfig(checkpoint=checkpoint, engine=config.engine)
    use_cores(node.engine)
    model = plan_model(node)
    if model.device.type != "cpu":
        raise ConfigError(f"bench drafts times steps of CPUs, not of {model.device}: --device cpu")
    model = replace(model, num_blocks=min(model.num_blocks, _most_blocks(config, model)))
    runner = load_runner(model, None, lambda _: None, packed_cache(node.engine))
    perf = PerfModel(step_costs(config.profile, node.engine, model, runner).costs)
    path, num_ids = model.checkpoint.path, model.config.vocab_size
    encode = partial(Tokenizer.from_checkpoint(path, num_ids).encode, add_special_tokens=False)
    plays, rows = config.shape in SHAPES, []
    for name in config.texts:
        for batch in config.batches:
            companions = runner.kv_cache.companions
            pool = BlockPool(model.num_blocks, model.layout.block_size, companions=companions)
            count = _TEXTS_A_BATCH * max(batch, config.rounds // _TEXTS_A_BATCH)
            texts = make_texts(name, encode, num_ids, count, config.tokens)
            most_rows = node.engine.max_batch_size
            sources: list[Source] = [OwnText(), FormerAnswers()]
            speculation = Speculation(pool, perf.step_s, most_rows, sources)
            tenant = name if name == "agents" else ""
            streams = Streams(runner, pool, perf, plays=plays, tenant=tenant)
            case = Case(streams, texts, batch, speculation)
            if tenant:
                case.rehearse(config.tokens)
            for number in range(config.rounds):
                case.round(number, config.tokens)
            rows.append(case.row(config.shape, name, "played" if plays else "own"))
            say(f"{name}, {batch} at a time: {rows[-1].ratio:.2f}x")
    return rows


def _most_blocks(config: DraftsBenchConfig, model: NodeModel) -> int:
    """Blocks for the largest batch, and as much again for prompts that are kept."""
    layout = model.layout
    a_stream = layout.blocks_for(MOST_PROMPT + config.tokens) * (1 + layout.num_companions)
    return 2 * _TEXTS_A_BATCH * a_stream * max(config.batches)


def _table(report: DraftsReport) -> Table:
    first = report.rows[0]
    table = Table(title=f"{first.model}, answers {first.answers}: with drafts against without")
    table.add_column("texts")
    for column in ("batch", "off tok/s", "on tok/s", "ratio", "95 %", "tokens/step", "right"):
        table.add_column(column, justify="right")
    for row in report.rows:
        low, high = row.interval
        table.add_row(
            row.texts,
            str(row.batch),
            f"{row.off_tokens_per_s:.0f}",
            f"{row.on_tokens_per_s:.0f}",
            f"{row.ratio:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.accepted} of {row.drafted}",
        )
    return table


def _lookup_table(report: DraftsReport) -> Table:
    table = Table(title="a look for a draft")
    for column in ("history", "us", "p99 us", "MB a stream"):
        table.add_column(column, justify="right")
    for row in report.lookups:
        table.add_row(
            str(row.history), f"{row.look_us:.1f}", f"{row.p99_us:.1f}", f"{row.bytes / 1e6:.2f}"
        )
    return table
