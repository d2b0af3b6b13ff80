"""The key file: what it may say, and that it is followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.tenants.identity import Tenant
from coordinator.tenants.key_book import LOOK_S, KeyBook, parse_key_file
from coordinator.tenants.keys import PREFIX, key_id, new_key
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError

CLASSES = ("interactive", "standard", "batch")
A, B = hash_key("a"), hash_key("b")


def test_keys_are_not_guessed_and_not_kept() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) > 40 for key in keys)
    key = keys.pop()
    assert key not in hash_key(key)
    assert hash_key(key).startswith("sha256:" + key_id(hash_key(key)))


def test_a_file_describes_tenants() -> None:
    owners = parse_key_file(
        f"""
        [tenants.acme]
        keys = ["{A}", "{B}"]
        default_class = "interactive"
        requests_per_minute = 60
        weight = 2.0
        [tenants.nightly]
        classes = ["batch"]
        default_class = "batch"
        """,
        CLASSES,
    )
    acme = Tenant(
        name="acme",
        keys=[A, B],
        default_class="interactive",
        requests_per_minute=60,
        weight=2.0,
    )
    assert owners == {A: acme, B: acme}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants", "not valid TOML"),
        ("[tenant.a]", "`tenant`"),
        ("[tenants.a]\nkey = []", "key"),
        ("[tenants.a]\nkeys = ['pds-plain']", "pdserve key a"),
        (f"[tenants.a]\nkeys = ['{A}']\n[tenants.b]\nkeys = ['{A}']", "a and b|b and a"),
        ("[tenants.a]\ndefault_class = 'gold'", "gold"),
        ("[tenants.a]\nclasses = ['gold']", "gold"),
        ("[tenants.a]\nclasses = ['batch']", "default_class"),
        ("[tenants.a]\nweight = 0", "weight"),
        ("[tenants.a]\nrequests_per_minute = -1", "requests_per_minute"),
        ("[tenants.'a b']", "a b"),
        ("[tenants.owner]", '"owner".* key in the environment'),
        ("[tenants.a]\ncache_group = 'owner'", '"owner".* key in the environment'),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_key_file(text, CLASSES)


def test_a_file_is_followed(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.toml", ManualClock()
    file.write_text(f"[tenants.a]\nkeys = ['{A}']")
    book = KeyBook(file, {hash_key("extra"): Tenant(name="owner")}, CLASSES, clock)
    assert book.owner("a") is not None
    file.write_text(f"[tenants.b]\nkeys = ['{B}']\nweight = 3.0")
    os.utime(file, ns=(1, 1))  # however coarse the file system's clock is
    assert book.owner("b") is None, "it has just been looked at"
    clock.advance(LOOK_S)
    found = book.owner("b")
    assert found is not None
    assert (found[0].name, found[0].weight, found[1]) == ("b", 3.0, B)
    assert book.owner("a") is None
    assert book.owner("extra") is not None


def test_a_broken_or_missing_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys.toml", ManualClock()
    file.write_text(f"[tenants.a]\nkeys = ['{A}']")
    book = KeyBook(file, {}, CLASSES, clock)
    for number, spoil in enumerate((lambda: file.write_text("[tenants"), file.unlink)):
        spoil()
        clock.advance(LOOK_S)
        assert book.owner("a") is not None
        assert len(caplog.records) == number + 1
    file.write_text(f"[tenants.b]\nkeys = ['{B}']")
    clock.advance(LOOK_S)
    assert book.owner("b") is not None


def test_a_coordinator_does_not_begin_with_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        KeyBook(tmp_path / "keys.toml", {}, CLASSES, ManualClock())
