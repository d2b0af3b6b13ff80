"""Which form reads are sent in follows from what each has achieved, and costs few trials."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

from kv_transfer.codecs import choice as codec_choice
from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.choice import CodecChoice, SharedTime, coding_rate
from kv_transfer.codecs.codec import Bytes
from pdserve.kv import KvDtype, KvLayout

LAYOUT = KvLayout.gqa(layers=2, heads=2, head_dim=64, block_size=16, dtype=KvDtype.BFLOAT16)
CODECS = codecs_for(LAYOUT)
MIB = 1 << 20


async def reads(
    choice: CodecChoice, rates: dict[str, float], count: int = 160, size: int = MIB
) -> Counter[str]:
    """How so many reads were sent, where each way carries so many bytes per second."""
    sent: Counter[str] = Counter()
    for _ in range(count):
        sending = await choice.next(size)
        sending.num_bytes = size if not sending.codec else int(size / 1.5)
        sending.arrived = size
        choice.note(sending, size / rates[sending.codec])
        sent[sending.codec] += 1
    return sent


async def test_a_slow_network_is_given_coded_bytes() -> None:
    choice = CodecChoice(CODECS)
    sent = await reads(choice, {"": 1e8, "zstd": 1.5e8})
    assert sent["zstd"] > 140  # after trials that come soon at first, two of 34 are one
    assert str(choice) == "zstd 1.50x"


@pytest.mark.parametrize("num_slow", [1, 2])
async def test_a_trial_that_meets_a_busy_core_does_not_decide_for_long(num_slow: int) -> None:
    """Prompts of 50 MiB over 1 Gb/s: the codec's first trials take three times as long."""
    choice, sent = CodecChoice(CODECS), Counter[str]()
    for _ in range(12):
        rate = 0.6e8 if sent["zstd"] < num_slow else 1.8e8
        sent += await reads(choice, {"": 1.2e8, "zstd": rate}, 1, 50 * MIB)
    assert str(choice) == "zstd 1.50x"
    assert sent["zstd"] >= 5


async def test_where_coding_gains_nothing_bytes_go_as_they_are() -> None:
    choice = CodecChoice(CODECS)
    sent = await reads(choice, {"": 1e8, "zstd": 1.05e8})
    assert sent[""] > 140
    assert str(choice) == "raw"


async def test_a_network_that_is_faster_than_the_codec_is_tried_with_none() -> None:
    rate = 4 * coding_rate(CODECS["zstd"])
    assert await reads(CodecChoice(CODECS), {"": rate, "zstd": rate / 9}) == {"": 160}


async def test_a_network_that_changes_changes_the_choice() -> None:
    choice = CodecChoice(CODECS)
    await reads(choice, {"": 1e8, "zstd": 1.5e8})
    await reads(choice, {"": 3e8, "zstd": 1e8}, 640)  # the peer's cores are busy now
    assert str(choice) == "raw"
    await reads(choice, {"": 1e7, "zstd": 1.5e7}, 640)
    assert str(choice).startswith("zstd")


@pytest.mark.parametrize("size", [MIB, 50 * MIB])
async def test_the_reads_that_show_a_change_are_the_last_that_go_the_wrong_way(size: int) -> None:
    """From 1 Gb/s to 10, where coding takes 2.4 times as long, to 0.1, and back."""
    links = {
        "zstd": [{"": 1.25e8, "zstd": 1.8e8}, {"": 1.25e7, "zstd": 1.8e7}],
        "": [{"": 1.2e9, "zstd": 4.8e8}] * 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_choice, "coding_rate", lambda _: 4.8e8)
        choice = CodecChoice(CODECS)
        for best, other in (("zstd", ""), ("", "zstd")) * 2:
            sent = await reads(choice, links[best].pop(0), 64, size)
            assert sent[other] <= 2 * 2 + 2 * 4, (best, sent)


async def test_reads_at_the_same_time_are_charged_for_their_shares() -> None:
    shared = SharedTime()
    first = shared.begin(10.0)
    second = shared.begin(11.0)
    assert shared.end(second, 15.0) == 2.0  # four seconds with another one
    third = shared.begin(15.0)
    assert shared.end(first, 16.0) == 3.5  # one alone, then five with another one
    assert shared.end(third, 17.0) == 1.5
    assert shared.end(shared.begin(100.0), 101.0) == 1.0  # nobody is charged for idle time


async def test_a_codec_that_is_too_slow_for_a_deadline_is_not_tried_by_the_next_read() -> None:
    choice = CodecChoice(CODECS)
    await reads(choice, {"": 1e8}, 2)
    trial = await choice.next(64 * MIB)
    assert trial.codec == "zstd"
    choice.note(trial, 10.0)  # it was cancelled then
    assert not (await choice.next(64 * MIB)).codec


@pytest.mark.parametrize("codecs", [CODECS, {}])
async def test_small_reads_and_peers_without_codecs_have_no_trials(
    codecs: dict[str, object],
) -> None:
    choice = CodecChoice(codecs)  # type: ignore[arg-type]
    size = 4096 if codecs else MIB
    for _ in range(100):
        sending = await choice.next(size)
        assert not sending.codec
        sending.arrived = size
        choice.note(sending, 1.0)
    assert str(choice) == "raw"


class WatchedCodec:
    """Makes nothing of chunks, and knows in which threads it was asked to."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, chunk: Bytes) -> list[Bytes | bytes]:
        self.threads.add(threading.get_ident())
        return []

    def sample(self, num_bytes: int) -> Bytes:
        self.threads.add(threading.get_ident())
        return np.empty(num_bytes, dtype=np.uint8)

    def decode(self, coded: Bytes, chunk: Bytes) -> None:
        raise AssertionError("nothing was coded")


async def test_what_a_codec_takes_is_not_measured_on_the_event_loop() -> None:
    codec = WatchedCodec()
    await reads(CodecChoice({"zstd": codec}), {"": 1e3, "zstd": 2e3}, 10)
    assert codec.threads
    assert threading.get_ident() not in codec.threads
