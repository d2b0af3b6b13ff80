"""`pdserve bench compare`: what it can be told, what it starts, what it prints."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

import pdserve
from pdserve.commands.bench.compare import clusters as of_clusters
from pdserve.commands.bench.compare import run as bench_compare
from pdserve.commands.bench.compare.clusters import Clusters
from pdserve.commands.bench.compare.config import CompareConfig, Tuning
from pdserve.commands.bench.compare.progress import Progress, announcement, busy_warning
from pdserve.commands.bench.compare.report import CompareReport
from pdserve.commands.bench.compare.run import case_maker
from pdserve.commands.bench.compare.runner import Candidate, Experiment, ModeServer
from pdserve.commands.bench.compare.shown.table import mode_table, remarks, tables, verdict_lines
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.slo_score import score
from pdserve.commands.cli.main import build_parser, main
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import EngineConfig, PolicyConfig
from pdserve.settings.values import parse_bytes
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import FORCED
from pdserve.shared.slo import parse_slo_classes
from tests.fakes.server import FakeServer
from tests.matrix import matrix
from tests.unit.commands.bench.compare.made_reports import made_report, outcome

PROMISE = Promise(ttft_s=1.5, tpot_s=0.0071)


def test_quick_is_less_of_everything() -> None:
    plan, quick = CompareConfig().plan, CompareConfig(quick=True).plan
    assert quick.duration_s < plan.duration_s
    assert quick.idle_requests < plan.idle_requests
    assert set(quick.tunings) < set(plan.tunings)
    assert quick.least_requests < plan.least_requests
    assert quick.budget_s < 600
    assert quick.modes == plan.modes


def test_quick_does_not_override_what_is_quicker_still() -> None:
    config = CompareConfig(quick=True, duration_s=2.0, budget_s=60.0, chunks=[512, 128])
    plan = config.plan
    assert (plan.duration_s, plan.budget_s) == (2.0, 60.0)
    assert plan.tunings == [Tuning(512), Tuning(512, one_node=True)]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    matrix(
        [
            (["--modes=adaptive,adaptive"], "must not name anything twice"),
            (["--scenarios=conversation,conversation"], "must not name anything twice"),
            (["--policies=sjf-aging,sjf-aging"], "must not name anything twice"),
            (["--policies=sjf"], 'there is no policy "sjf". There are, besides installed ones'),
            (["--policies=sjf-aging+edf-slack"], "are both a prefill policy"),
            (["--policies=sjf-aging", "--against=sjf-aging=http://a"], "a mode or policy has"),
            (["--links=fast"], 'link "fast" should be as in'),
            (["--rates=2,1"], "must rise"),
            (["--rates=1,1e6"], "would have 30000000 requests"),
            (["--shape=7b"], "there are demo-14m, 25m"),
            (["--trace=/nowhere/trace.csv"], "cannot read the trace"),
            (["--out=/dev/null/x"], "cannot write there"),
        ],
        4,
    ),
)
def test_the_users_fault_is_told_before_anything_starts(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "compare", f"--out={tmp_path}", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_nobody_to_compare_is_told() -> None:
    with pytest.raises(ConfigError, match="--modes names none"):
        _ = CompareConfig(modes=[]).plan
    assert CompareConfig(modes=[], against=["a=http://a", "b=http://b"]).plan.modes == ["a", "b"]


def test_flags_are_read() -> None:
    line = "bench compare --quick --scenarios conversation --rates 1,2.5 --json"
    line += " --set policy.local_chunk=32 --set engine.kv_memory=1GiB --set chunks=0,64"
    assert build_parser().parse_args(line.split()).command is not None


def test_help_shows_few_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--help"])
    shown = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(shown) <= 24
    assert {"--quick", "--modes", "--set", "--out"} <= {*shown}
    assert not {"--local-chunk", "--kv-memory", "--watermark"} & {*shown}


def test_the_plan_is_told_first_and_a_busy_machine_with_it() -> None:
    config = CompareConfig(quick=True, rates=[1, 2.5], shape="25m")
    lines = "\n".join(announcement(config, config.plan, Path("out"), 100.0))
    for told in ("disaggregated, colocated, adaptive", "long-prompts", "25m", "1/s, 2.5/s", "out"):
        assert told in lines
    assert "time limit: 9:20 min" in lines
    assert "busy already (load 100.0" in lines
    assert busy_warning(0.01) == ""


def test_policies_are_contestants_beside_the_modes() -> None:
    some = ["round-robin", "sjf-aging+static"]
    made = clusters(modes=["adaptive"], policies=some, admission=True)
    assert CompareConfig(modes=["adaptive"], policies=some).plan.modes == ["adaptive", *some]
    plain, routed, both = [
        made.cluster_config(Candidate(name), PROMISE) for name in ("adaptive", *some)
    ]
    assert {config.mode for config in (plain, routed, both)} == {"adaptive"}
    assert routed == replace(plain, routing=replace(plain.routing, router="round-robin"))
    other = replace(plain.policy, prefill_policy="sjf-aging", decode_policy="static")
    assert both == replace(plain, policy=other)


def test_progress_says_when_and_how_long_at_most() -> None:
    clock, output = ManualClock(), io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with Progress(600.0, clock, console) as progress:
        clock.advance(90.0)
        progress.tell("long-prompts: colocated, idle")
    assert "[1:30 min] long-prompts: colocated, idle" in output.getvalue()
    assert "8:30 min left at most" in output.getvalue()
    plain = io.StringIO()
    with Progress(600.0, clock, Console(file=plain)) as progress:
        progress.tell("at work" * 30)
    assert plain.getvalue() == f"[0 s] {'at work' * 30}\n", "a line in a file is not wrapped"


@pytest.mark.long
def test_plots_are_no_reason_to_wait_at_the_start() -> None:
    code = "import sys, pdserve.commands.bench.compare.run; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def clusters(num_gpus: int = 0, **changes: object) -> Clusters:
    config = CompareConfig(**changes)  # type: ignore[arg-type]
    return Clusters(config, "model", lambda name, line: None, lambda text: None, num_gpus)


def test_every_mode_gets_the_same_nodes_and_promises() -> None:
    configs = [
        clusters(prefill=2, decode=3, admission=True).cluster_config(
            Candidate(mode, tuning), PROMISE
        )
        for mode, tuning in (
            ("disaggregated", None),
            ("adaptive", None),
            ("colocated", Tuning(64)),
        )
    ]
    assert [(c.num_prefill, c.decode) for c in configs] == [(2, 3), (2, 3), (0, 5)]
    assert [c.policy.local_chunk for c in configs] == [0, 0, 64]
    for config in configs:
        assert config.port == 0
        assert config.checkpoint.model == "model"
        assert config.routing.admission
        routing = config.routing
        promised = parse_slo_classes(routing.slo_classes, routing.default_class).default
        assert (promised.ttft_s, promised.tpot_s) == (1.5, 0.0071)


def test_one_node_has_all_that_several_would_have() -> None:
    config = clusters(prefill=2, decode=1, engine=EngineConfig(threads=4, kv_memory="1GiB"))
    one = config.cluster_config(Candidate("colocated", Tuning(0, one_node=True)), PROMISE)
    assert (one.num_prefill, one.decode, one.engine.threads) == (0, 1, 12)
    assert parse_bytes(one.engine.kv_memory) == 3 << 30


def test_a_node_of_multiplexed_mode_has_what_one_of_each_would_have() -> None:
    config = clusters(prefill=2, decode=2, engine=EngineConfig(threads=4, kv_memory="1GiB"))
    both = config.cluster_config(Candidate("multiplexed"), PROMISE)
    assert (both.num_prefill, both.decode, both.engine.threads) == (0, 2, 8)
    assert parse_bytes(both.engine.kv_memory) == 2 << 30


@pytest.mark.parametrize(
    ("num_gpus", "engine", "ranks"),
    [
        (1, EngineConfig(), 1),
        (2, EngineConfig(), 2),
        (3, EngineConfig(), 2),
        (8, EngineConfig(tensor_parallel=2), 4),
        (2, EngineConfig(tensor_parallel=2), 2),
        (2, EngineConfig(device="cuda:1"), 1),
    ],
    ids=str,
)
def test_one_node_has_the_gpus_that_several_would_have(
    num_gpus: int, engine: EngineConfig, ranks: int
) -> None:
    config = clusters(num_gpus, prefill=1, decode=1, engine=engine)
    one = config.cluster_config(Candidate("colocated", Tuning(0, one_node=True)), PROMISE).engine
    assert (one.tensor_parallel, one.kv_memory) == (ranks, "auto")


def test_on_gpus_each_mode_has_its_share_of_them() -> None:
    """Where a node would take all that is left, nothing would be left for the next mode."""
    config = clusters(1, modes=["disaggregated", "colocated", "adaptive"])
    engine = config.cluster_config(Candidate("adaptive"), PROMISE).engine
    assert (engine.kv_memory, engine.kv_utilization) == ("auto", pytest.approx(0.3))
    named = clusters(1, engine=EngineConfig(kv_memory="8GiB"))
    engine = named.cluster_config(Candidate("adaptive"), PROMISE).engine
    assert (engine.kv_memory, engine.kv_utilization) == ("8GiB", pytest.approx(0.9))


class Crowded:
    """A cluster whose nodes share a GPU, and that is ready at once."""

    url = "http://127.0.0.1:1"
    warning = "2 nodes on cuda:0, and no MPS"

    def __init__(self, config: ClusterConfig, *, on_line: object) -> None:
        self.config = config

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def status(self) -> SimpleNamespace:
        return SimpleNamespace(model="m")


async def test_what_makes_clusters_slow_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def limit(url: str, model: str) -> int:
        return 512

    monkeypatch.setattr(of_clusters, "Cluster", Crowded)
    monkeypatch.setattr(of_clusters, "max_model_len", limit)
    told: list[str] = []
    config = Clusters(CompareConfig(), "model", lambda name, line: None, told.append, 1)
    for mode in ("disaggregated", "adaptive"):
        async with config.launch(Candidate(mode), None) as server:
            assert server.max_model_len == 512
    assert told == ["disaggregated: 2 nodes on cuda:0, and no MPS"]


def test_idle_clusters_promise_and_refuse_nothing() -> None:
    routing = clusters().cluster_config(Candidate("disaggregated"), None).routing
    promised = parse_slo_classes(routing.slo_classes, routing.default_class).default
    assert (promised.ttft_s, promised.tpot_s, routing.admission) == (0.0, 0.0, False)


def test_what_the_user_says_of_nodes_holds() -> None:
    config = clusters(
        engine=EngineConfig(kv_memory="1GiB"),
        policy=PolicyConfig(decode_policy="max-batch", local_chunk=32),
    ).cluster_config(Candidate("adaptive"), PROMISE)
    assert config.engine.kv_memory == "1GiB"
    assert (config.policy.decode_policy, config.policy.local_chunk) == ("max-batch", 32)
    assert not config.routing.admission


def test_the_tables_have_everything(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    for table in tables(made_report()):
        console.print(table)
    printed = capsys.readouterr().out
    for text in (
        "made-up: nothing",
        "TTFT 1000 ms, TPOT 20.0 ms (as given)",
        "1.5/s",  # disaggregated, half way from 100 % to 80 %
        "1.17/s",
        "500/500/500",
        "200.0 !",
        "1.25",
        "tuned at 1.5/s",
        "adaptive is missing: it has no nodes",
    ):
        assert text in printed, text


def test_goodput_beyond_the_rates_has_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_report()
    open_end = replace(
        report.modes[0],
        goodput=2.0,
        goodput_is="above the rates",
        goodput_interval=(1.2, None),
    )
    Console(width=200).print(mode_table(report.scenarios[0], [open_end, report.modes[1]]))
    printed = capsys.readouterr().out
    assert "2/s or more" in printed
    assert "> 1.2" in printed
    assert "%" not in printed.split("of the best")[1]


def test_a_busy_machine_is_remarked_on() -> None:
    report = made_report()
    assert "Other work" not in "\n".join(remarks(report))
    report.setup["load_average"] = 3.0
    assert "its load was 3.0" in "\n".join(remarks(report))


def test_a_late_client_and_cut_requests_are_remarked_on() -> None:
    report = made_report()
    told = "\n".join(verdict_lines(report.scenarios[0], report.modes))
    assert "from 1/s on the load client itself was late" in told
    said = "\n".join(remarks(report))
    assert "In 1 rows marked ! the client itself was late" in said
    assert "3 requests were cut" in said


def test_percentiles_of_few_requests_or_of_survivors_are_remarked_on() -> None:
    report = made_report()
    said = "\n".join(remarks(report))
    assert "Percentiles leave out what did not happen" in said  # five requests were refused
    assert "A p99 of fewer than 100 requests" in said
    many = [outcome(0.01)] * 100
    row = replace(report.modes[0].rows[0], score=score(many, report.scenarios[0].promise, 0.9))
    said = "\n".join(remarks(replace(report, modes=[replace(report.modes[0], rows=[row])])))
    assert "Percentiles leave out" not in said
    assert "A p99" not in said


def test_every_kind_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_report()
    assert "each kind of requests" not in [table.title for table in printed_tables(report)]
    mixed = [outcome(0.01)] * 9 + [outcome(0.01, kind="long"), outcome(0.05, kind="long")]
    row = replace(report.modes[0].rows[0], score=score(mixed, report.scenarios[0].promise, 0.9))
    report = replace(report, modes=[replace(report.modes[0], rows=[row])])
    (table,) = [t for t in printed_tables(report) if "each kind" in str(t.title)]
    Console(width=200).print(table)
    lines = capsys.readouterr().out.splitlines()
    chat, long = (next(line.split() for line in lines if kind in line) for kind in ("chat", "long"))
    assert chat[5:10:2] == ["chat", "100%", "9"]
    assert long[5:10:2] == ["long", "50%", "2"]
    assert long[-2] == "30.0/46.0/49.6"  # TPOT of 10 and 50 ms, linear between them


def printed_tables(report: CompareReport) -> list[Table]:
    return [table for table in tables(report) if isinstance(table, Table)]


@pytest.mark.parametrize(("prompts", "streams"), [(3, 8), (4, 7)])
def test_disturbances_that_were_refused_are_remarked_on(prompts: int, streams: int) -> None:
    report = made_report()
    assert "to disturb" not in "\n".join(remarks(report))
    mode = report.modes[0]
    assert mode.interference is not None
    partial = replace(mode.interference, prompts_finished=prompts, streams_finished=streams)
    report.modes[0] = replace(mode, interference=partial)
    said = "\n".join(remarks(report))
    assert f"served {prompts} of 4 prompts that were to disturb its streams" in said
    assert f"{streams} of 8 streams" in said


def test_the_report_is_one_json_object_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def launch(
        self: Clusters, candidate: Candidate, promise: Promise | None
    ) -> AsyncIterator[ModeServer]:
        async with FakeServer().running() as server:
            yield server

    monkeypatch.setattr(Clusters, "launch", launch)
    flags = "--scenarios short-prompts --modes disaggregated,colocated --set chunks=0"
    short = "--rates 400,500 --duration-s 0.1 --set length_scale=0.1 --json"
    short += " --set one_node=false --set idle_requests=1"
    promise = "--ttft-s 9 --tpot-s 9"
    words = [*flags.split(), *short.split(), *promise.split()]
    assert main(["bench", "compare", f"--out={tmp_path}", *words]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert [(mode["mode"], mode["goodput"]) for mode in report["modes"]] == [
        ("disaggregated", 500.0),
        ("colocated", 500.0),
    ]
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["setup"]["config"]["seed"] == 0
    assert report["setup"]["machine"]
    assert report["setup"]["packages"]["numpy"]
    assert "disaggregated at 400/s" in captured.err
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "report.json",
        "report.html",
        "requests.jsonl",
        "processes.log",
        "short-prompts-attainment.png",
        "short-prompts-latency.png",
    }
    page = (tmp_path / "report.html").read_text()
    assert "this run cannot tell" in page
    assert page.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!#)', page), "nothing is loaded from elsewhere"
    assert 'name="viewport"' in page, "on a phone it is as wide as the phone"
    assert "&quot;seed&quot;: 0" in page
    again = tmp_path / "again"
    assert main(["bench", "compare", f"--from={tmp_path}", f"--out={again}"]) == 0
    for name in ("report.json", "report.html"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes(), name
    capsys.readouterr()
    runs = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert {run["what"] for run in runs} == {"warm-up", "idle", "burst", "rate"}
    monkeypatch.chdir(tmp_path)
    exec(example("docs/BENCHMARKS.md"), {})
    attainments = {(m["mode"], r["rate"]): r["score"]["attainment"] for m, r in rows(report)}
    computed = (line.split() for line in capsys.readouterr().out.splitlines())
    assert {(mode, float(rate)): float(share) for _, mode, rate, share in computed} == attainments


def example(document: str) -> str:
    """Return its code, which computes the attainment of each run from the raw results."""
    text = (Path(pdserve.__file__).parents[1] / document).read_text()
    return text.split("```python\n")[1].split("```")[0]


def rows(report: Any) -> Iterator[tuple[Any, Any]]:
    return ((mode, row) for mode in report["modes"] for row in mode["rows"])


def test_results_of_another_comparison_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requests.jsonl").write_text("precious")
    assert main(["bench", "compare", f"--out={tmp_path}"]) == 2
    assert "has the results of another comparison" in capsys.readouterr().err
    assert (tmp_path / "requests.jsonl").read_text() == "precious"


@pytest.mark.long
def test_what_was_measured_before_ctrl_c_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(
        experiment: Experiment, make_cases: object, report: CompareReport
    ) -> None:
        made = made_report()
        report.modes.extend(made.modes)
        report.scenarios.extend(made.scenarios)
        raise KeyboardInterrupt

    assert bench_compare.run_with(CompareConfig(out=str(tmp_path)), {}, interrupted) == FORCED
    assert "made-up: nothing" in capsys.readouterr().out
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [mode["mode"] for mode in kept["modes"]] == ["disaggregated", "colocated"]


@pytest.mark.long
def test_what_was_measured_before_an_error_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(experiment: Experiment, make_cases: object, report: CompareReport) -> None:
        report.modes.extend(made_report().modes)
        report.scenarios.extend(made_report().scenarios)
        raise ClusterError("the machine is on fire")

    with pytest.raises(ClusterError, match="on fire"):
        bench_compare.run_with(CompareConfig(out=str(tmp_path)), {}, breaks)
    said = capsys.readouterr()
    assert "made-up: nothing" in said.out
    assert "an error has ended it" in said.err
    kept = json.loads((tmp_path / "report.json").read_text())
    assert [mode["mode"] for mode in kept["modes"]] == ["disaggregated", "colocated"]


def test_a_trace_is_replayed_instead_of_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{10 + i}.0000000,{40 + i},{2 + i}" for i in range(10)]
    path.write_text("\n".join(lines))
    (case,) = case_maker(CompareConfig(trace=str(path)))(8192)
    assert case.name == "azure"
    assert [len(request.prompt) for request in case.workload.first(3)] == [40, 41, 42]


def test_a_scenario_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit a model"):
        case_maker(CompareConfig(length_scale=3.0))(8192)
