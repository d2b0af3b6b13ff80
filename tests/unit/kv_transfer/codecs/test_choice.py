"""Which form reads are sent in follows from what each has achieved, and costs few trials."""

from __future__ import annotations

from collections import Counter

import pytest

from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.choice import CodecChoice, coding_rate
from pdserve.kv import KvDtype, KvLayout

LAYOUT = KvLayout.gqa(layers=2, heads=2, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
CODECS = codecs_for(LAYOUT)
MIB = 1 << 20


def reads(choice: CodecChoice, rates: dict[str, float], count: int = 160) -> Counter[str]:
    """How so many reads of a MiB were sent, where each way carries so many bytes per second."""
    sent: Counter[str] = Counter()
    for _ in range(count):
        sending = choice.next(MIB)
        sending.num_bytes = MIB if not sending.codec else int(MIB / 1.5)
        choice.note(sending, MIB, MIB / rates[sending.codec])
        sent[sending.codec] += 1
    return sent


def test_a_slow_network_is_given_coded_bytes() -> None:
    choice = CodecChoice(CODECS)
    sent = reads(choice, {"": 1e8, "zstd": 1.5e8})
    assert sent["zstd"] > 140  # after two trials of each, one of 16 is a trial
    assert str(choice) == "zstd 1.50x"


def test_where_coding_gains_nothing_bytes_go_as_they_are() -> None:
    choice = CodecChoice(CODECS)
    sent = reads(choice, {"": 1e8, "zstd": 1.05e8})
    assert sent[""] > 140
    assert str(choice) == "raw"


def test_a_network_that_is_faster_than_the_codec_is_tried_with_none() -> None:
    rate = 4 * coding_rate(CODECS["zstd"])
    assert reads(CodecChoice(CODECS), {"": rate, "zstd": rate / 9}) == {"": 160}


def test_a_network_that_changes_changes_the_choice() -> None:
    choice = CodecChoice(CODECS)
    reads(choice, {"": 1e8, "zstd": 1.5e8})
    reads(choice, {"": 3e8, "zstd": 1e8}, 640)  # the peer's cores are busy now
    assert str(choice) == "raw"
    reads(choice, {"": 1e7, "zstd": 1.5e7}, 640)
    assert str(choice).startswith("zstd")


@pytest.mark.parametrize("codecs", [CODECS, {}])
def test_small_reads_and_peers_without_codecs_have_no_trials(codecs: dict[str, object]) -> None:
    choice = CodecChoice(codecs)  # type: ignore[arg-type]
    size = 4096 if codecs else MIB
    for _ in range(100):
        sending = choice.next(size)
        assert not sending.codec
        choice.note(sending, size, 1.0)
    assert str(choice) == "raw"
