"""Buckets and quotas, on a manual clock."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tenants.buckets import Bucket
from coordinator.tenants.identity import Tenant
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Amounts, Ledger
from coordinator.tenants.opening import open_tenants
from coordinator.tenants.quota import Quota, format_wait
from coordinator.tenants.tenants import Admitted, Tenants
from pdserve.settings.access import AccessConfig, hash_key
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import RateLimited


def test_a_minutes_worth_and_then_as_it_flows() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == 1.0
    assert bucket.wait_s(1, 1.0) == 0.0
    assert bucket.level(3600.0) == 60


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 500)), max_size=50),
)
def test_no_more_than_flows_in_is_ever_taken(
    per_minute: int, asks: list[tuple[float, int]]
) -> None:
    bucket, now_s, taken = Bucket(per_minute, 0.0), 0.0, 0
    for after_s, amount in asks:
        now_s += after_s
        if amount <= per_minute and bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken += amount
    assert taken <= per_minute * (1 + now_s / 60) * (1 + 1e-9)


@given(st.integers(1, 1000), st.integers(0, 3000), st.integers(1, 1000))
def test_waiting_as_told_is_enough(per_minute: int, taken: int, amount: int) -> None:
    bucket = Bucket(per_minute, 0.0)
    bucket.take(taken, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    assert bucket.wait_s(amount, wait_s) == pytest.approx(0, abs=1e-6)


def test_without_a_limit_nothing_waits() -> None:
    quota = Quota(Tenant(name="a"), 0.0)
    for _ in range(1000):
        quota.take_request(0.0)
        quota.take_tokens(10**9, 0.0)
    assert quota.headers(0.0) == {}


def test_requests_are_limited() -> None:
    quota = Quota(Tenant(name="a", requests_per_minute=2), 0.0)
    quota.take_request(0.0)
    quota.take_request(0.0)
    with pytest.raises(RateLimited, match="2 requests a minute") as refused:
        quota.take_request(0.0)
    assert refused.value.retry_after_s == 30.0
    quota.take_request(30.0)


def test_output_is_paid_for_afterwards() -> None:
    quota = Quota(Tenant(name="a", tokens_per_minute=600), 0.0)
    quota.take_request(0.0)
    quota.take_tokens(500, 0.0)
    quota.charge(700, 0.0)  # 600 more than there were: a minute's worth
    with pytest.raises(RateLimited, match="tokens a minute") as refused:
        quota.take_request(0.0)
    assert refused.value.retry_after_s == pytest.approx(60.1)
    with pytest.raises(RateLimited, match="tokens a minute"):
        quota.take_tokens(100, 61.0)
    quota.take_tokens(100, 80.0)


def test_a_prompt_that_never_fits_is_told_so() -> None:
    quota = Quota(Tenant(name="a", tokens_per_minute=600), 0.0)
    with pytest.raises(RateLimited, match=r"601 tokens.*600 a minute") as refused:
        quota.take_tokens(601, 0.0)
    assert refused.value.retry_after_s == math.inf


def test_new_limits_do_not_forget_what_was_used() -> None:
    quota = Quota(Tenant(name="a", requests_per_minute=10), 0.0)
    for _ in range(10):
        quota.take_request(0.0)
    quota.follow(Tenant(name="a", requests_per_minute=20), 1, 0.0)
    assert quota.headers(0.0)["x-ratelimit-remaining-requests"] == "10"
    quota.follow(Tenant(name="a", requests_per_minute=5), 1, 0.0)
    assert quota.headers(0.0)["x-ratelimit-remaining-requests"] == "0"


def test_each_coordinator_allows_its_part() -> None:
    """What one had used before the other came is not given out again."""
    tenant = Tenant(name="a", requests_per_minute=10)
    first, second = Quota(tenant, 0.0), Quota(tenant, 0.0)
    for _ in range(2):
        first.take_request(0.0)
    for quota in (first, second):
        quota.follow(tenant, 2, 0.0)
    assert first.headers(0.0)["x-ratelimit-limit-requests"] == "10"
    assert first.headers(0.0)["x-ratelimit-remaining-requests"] == "6"
    for _ in range(5):
        second.take_request(0.0)
    with pytest.raises(RateLimited, match="'a' may use 10 requests a minute"):
        second.take_request(0.0)
    second.follow(tenant, 1, 0.0)
    assert second.headers(0.0)["x-ratelimit-remaining-requests"] == "5"


def test_a_new_limit_does_not_count_what_was_used_without_one() -> None:
    unlimited, limited = (
        Tenant(name="a", requests_per_minute=10, tokens_per_minute=limit) for limit in (0, 600)
    )
    quota = Quota(unlimited, 0.0)
    assert quota.take_tokens(10**6, 0.0) == 0
    quota.charge(10**6, 0.0)
    quota.follow(limited, 1, 0.0)
    assert quota.headers(0.0)["x-ratelimit-remaining-tokens"] == "600"
    assert quota.take_tokens(600, 0.0) == 600
    quota.follow(unlimited, 1, 0.0)
    quota.take_tokens(10**6, 0.0)
    quota.follow(limited, 1, 60.0)
    quota.take_request(60.0)


def test_a_prompt_that_was_not_charged_is_not_given_back() -> None:
    """A limit was set while the call ran, and then the call failed."""
    unlimited, limited = (
        Tenant(name="a", requests_per_minute=10, tokens_per_minute=limit) for limit in (0, 600)
    )
    tenants = Tenants(None, None, "m", ManualClock())
    quota = Quota(unlimited, 0.0)
    before, after = (Admitted(tenant, "key", quota) for tenant in (unlimited, limited))
    tenants.take_prompt(before, 500)
    quota.follow(limited, 1, 0.0)
    tenants.take_prompt(after, 600)
    tenants.end(before, Amounts())
    assert quota.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    tenants.end(after, Amounts())
    assert quota.headers(0.0)["x-ratelimit-remaining-tokens"] == "600"


def test_headers_are_openais() -> None:
    quota = Quota(Tenant(name="a", requests_per_minute=60, tokens_per_minute=6000), 0.0)
    quota.take_request(0.0)
    quota.take_tokens(3000, 0.0)
    assert quota.headers(0.25) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "750ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "3025",
        "x-ratelimit-reset-tokens": "30s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.25, "250ms"), (1, "1s"), (59.6, "1m0s"), (90, "1m30s")]
)
def test_waits_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_wait(seconds) == text


def test_what_was_used_up_before_a_restart_is_used_up_after_it(tmp_path: Path) -> None:
    """The next coordinator's clock begins anew, and the buckets have been refilled meanwhile."""
    file, since_1970 = tmp_path / "keys.toml", 1e9
    limits = "requests_per_minute = 4\ntokens_per_minute = 600"
    file.write_text(f'[tenants.acme]\nkeys = ["{hash_key("key")}"]\n{limits}')

    def tenants(clock: ManualClock) -> Tenants:
        keys = KeyBook(file, {}, ("standard",), clock)
        return Tenants(
            keys, Ledger(tmp_path / "usage.sqlite"), "m", clock, since_1970=lambda: since_1970
        )

    first = tenants(ManualClock(1000.0))
    for number in range(4):
        admitted = first.identify("key")
        first.begin(admitted)
        first.take_prompt(admitted, 150)
        if number < 3:  # the last one is under way when the coordinator ends
            first.end(admitted, Amounts(1, 0, 100, 0, 50))
    with pytest.raises(RateLimited):
        first.begin(admitted)
    first.close()

    since_1970 += 15
    clock = ManualClock()
    second = tenants(clock)
    admitted = second.identify("key")
    headers = second.headers(admitted)
    assert headers["x-ratelimit-remaining-requests"] == "1"
    assert headers["x-ratelimit-remaining-tokens"] == "150"
    second.begin(admitted)
    with pytest.raises(RateLimited) as refused:
        second.begin(admitted)
    assert refused.value.retry_after_s == pytest.approx(15)
    second.close()


@pytest.mark.parametrize(
    ("usage_db", "port", "has_keys", "file"),
    [
        ("", 8000, True, "pdserve/usage/org_model-8000.sqlite"),
        ("", 0, True, ""),
        ("", 8000, False, ""),
        ("memory", 8000, True, ""),
        ("mine.sqlite", 0, False, "mine.sqlite"),
    ],
)
def test_limits_outlive_a_coordinator_without_being_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usage_db: str,
    port: int,
    has_keys: bool,
    file: str,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["{hash_key("key")}"]\nrequests_per_minute = 4\n')
    access = AccessConfig(key_file=str(keys) if has_keys else "", usage_db=usage_db)
    config = CoordinatorConfig(port=port, access=access)
    open_tenants(config, ("standard",), "org/model", {}, ManualClock()).close()
    assert [*tmp_path.rglob("*.sqlite")] == ([tmp_path / file] if file else [])
