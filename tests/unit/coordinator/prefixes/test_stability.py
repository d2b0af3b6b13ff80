"""Prompts that change early, and all the ones that do not."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from coordinator.prefixes.stability import (
    MIN_GAP_S,
    NUM_BLOCKS,
    NUM_PLACES,
    WINDOW_PROMPTS,
    Break,
    PrefixStability,
    PrefixWatch,
    _Recent,
)
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Prompt
from pdserve.shared.clock import ManualClock

SIZE = 16
NUM_PROMPTS = 64


def text(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000, 50_000), k=num_tokens)


class Watcher:
    """A PrefixStability that is given time between two prompts."""

    def __init__(self) -> None:
        self.stability = PrefixStability()
        self.clock = ManualClock()

    def see(self, token_ids: list[int], num_cached: int = 0, salt: str = "") -> Break | None:
        self.clock.advance(MIN_GAP_S)
        return self.stability.observe(Prompt(token_ids, salt), SIZE, num_cached, self.clock.now())


def stamped(stamp: list[int], question: int) -> list[int]:
    """A system prompt of 320 tokens with a time stamp at token 50, then a question."""
    system = text(320)
    return system[:50] + stamp + system[50:] + text(40, seed=question)


def test_a_time_stamp_in_a_system_prompt_is_found() -> None:
    watcher = Watcher()
    assert watcher.see(stamped([1, 2, 3], 100)) is None
    found = watcher.see(stamped([4, 5, 6], 101), num_cached=48)
    assert found == Break(at_token=48, num_tokens=(323 // SIZE - 48 // SIZE - 1) * SIZE)
    assert watcher.stability.unstable_token == 48
    assert watcher.stability.unstable_share == found.num_tokens / (2 * 363)


@pytest.mark.parametrize("num_more", [1, 2, 7])
def test_a_stamp_that_changes_its_length_is_found_too(num_more: int) -> None:
    watcher = Watcher()
    watcher.see(stamped([1] * 3, 100))
    found = watcher.see(stamped([2] * (3 + num_more), 101), num_cached=48)
    assert found is not None
    assert found.at_token == 48
    assert found.num_tokens >= 200
    shorter = watcher.see(stamped([3, 3], 102), num_cached=48)
    assert shorter is not None
    assert shorter.at_token == 48


def test_a_change_across_the_end_of_a_block_is_found() -> None:
    watcher = Watcher()
    system = text(320)
    watcher.see(system[:60] + [1] * 8 + system[60:])
    found = watcher.see(system[:60] + [2] * 8 + system[60:], num_cached=48)
    assert found == Break(at_token=48, num_tokens=(328 // SIZE - 3 - 2) * SIZE)


def test_equal_beginnings_with_different_ends_are_as_they_should_be() -> None:
    watcher = Watcher()
    system = text(320)
    for question in range(20):
        assert watcher.see(system + text(80, seed=100 + question), num_cached=320) is None
    assert watcher.stability.unstable_share == 0
    assert watcher.stability.unstable_token is None


def test_a_conversation_that_grows_is_as_it_should_be() -> None:
    watcher = Watcher()
    whole = text(900)
    for num_tokens in range(100, 900, 100):
        assert watcher.see(whole[:num_tokens], max(0, num_tokens - 100) // SIZE * SIZE) is None


def test_what_was_evicted_is_not_called_unstable() -> None:
    watcher = Watcher()
    watcher.see(text(320))
    assert watcher.see(text(320), num_cached=0) is None
    assert watcher.see(text(320) + text(80, seed=7), num_cached=64) is None


def test_unrelated_prompts_have_nothing_in_common() -> None:
    watcher = Watcher()
    assert all(watcher.see(text(400, seed)) is None for seed in range(50))


def test_salts_keep_tenants_apart() -> None:
    watcher = Watcher()
    watcher.see(stamped([1], 100), salt="a")
    assert watcher.see(stamped([2], 101), salt="b") is None
    assert watcher.see(stamped([3], 102), salt="a", num_cached=48) is not None


def test_equal_text_in_another_place_is_not_the_same() -> None:
    watcher = Watcher()
    document = text(320)
    watcher.see(document)
    assert watcher.see(text(100, seed=9) + document) is None


def test_only_the_beginning_of_a_prompt_is_looked_at() -> None:
    watcher = Watcher()
    whole = text(NUM_BLOCKS * SIZE * 3)
    watcher.see(whole)
    beyond = NUM_BLOCKS * SIZE + 5
    changed = [*whole[:beyond], 1, *whole[beyond + 1 :]]
    assert watcher.see(changed, num_cached=NUM_BLOCKS * SIZE) is None


def test_short_and_empty_prompts() -> None:
    watcher = Watcher()
    assert [watcher.see(text(n)) for n in (0, 1, SIZE - 1, SIZE, SIZE + 1)] == [None] * 5


def test_prompts_that_come_too_fast_are_left_out() -> None:
    watcher = Watcher()
    watcher.see(stamped([1], 100))
    now_s = watcher.clock.now()
    assert watcher.stability.observe(Prompt(stamped([2], 101)), SIZE, 48, now_s) is None
    assert watcher.see(stamped([3], 102), num_cached=48) is not None


def test_findings_are_about_recent_prompts() -> None:
    watcher = Watcher()
    watcher.see(stamped([1], 100))
    watcher.see(stamped([2], 101), num_cached=48)
    assert watcher.stability.unstable_token == 48
    for _ in range(2 * WINDOW_PROMPTS):
        watcher.see(text(64), num_cached=64)
    assert watcher.stability.unstable_token is None


def test_what_was_seen_long_ago_is_forgotten() -> None:
    recent, numbers = _Recent(), random.Random(0)
    keys = [numbers.getrandbits(64) - (1 << 63) for _ in range(1000)]
    assert recent.count(keys) == 0
    recent.update(keys)
    assert recent.count(keys) > 990
    recent.update(numbers.getrandbits(64) for _ in range(NUM_PLACES // 8))
    assert recent.count(keys) > 800, "so many others rarely fall on the same place"
    recent.update(numbers.getrandbits(64) for _ in range(6 * NUM_PLACES))
    assert recent.count(keys) < 20


def test_what_is_seen_needs_no_memory() -> None:
    watcher = Watcher()
    watcher.see(text(NUM_BLOCKS * SIZE))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for seed in range(NUM_PROMPTS):
            watcher.see(text(NUM_BLOCKS * SIZE, seed))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 64 * NUM_PROMPTS, "bytes: less than one for each block of a prompt"


def test_a_watch_counts_and_tells_no_text() -> None:
    metrics, clock = CoordinatorMetrics(), ManualClock()
    watch = PrefixWatch(metrics, clock)
    for stamp, num_cached in ((1, 0), (2, 48), (3, 48)):
        watch.prefilled(Prompt(stamped([stamp] * 3, 100 + stamp), "secret-salt"), SIZE, num_cached)
        clock.advance(1.0)
    whole = text(33)
    watch.prefilled(Prompt(whole), SIZE, 32)  # the last token is never cached
    status = watch.status()
    assert status.unstable_token == 48
    assert status.cached_share == (48 + 48 + 32) / (3 * 363 + 33)
    lines = metrics.exposition().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["pdserve_cached_tokens_total"] == "128.0"
    assert values["pdserve_prefix_break_tokens_count"] == "3.0"
    assert values["pdserve_prefix_break_tokens_sum"] == "96.0"
    assert values['pdserve_prefix_break_tokens_bucket{le="0.0"}'] == "1.0"
    assert values["pdserve_prefix_unstable_position_tokens_sum"] == "96.0"
    assert values["pdserve_prefix_unstable_tokens_total"] == str(2 * 16.0 * SIZE)
    assert "secret-salt" not in str(lines) + str(status)
