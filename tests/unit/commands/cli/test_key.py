"""`pdserve key`: its entry can be put into a key file as it is."""

from __future__ import annotations

import pytest

from coordinator.tenants.key_book import parse_key_file
from pdserve.commands.cli import key
from pdserve.shared.errors import ConfigError


@pytest.mark.parametrize("tenant", ["acme", "acme.eu"])
def test_the_entry_is_accepted_by_a_key_file(
    tenant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key.run(tenant)
    (owner,) = parse_key_file(capsys.readouterr().out, ()).values()
    assert owner.name == tenant


@pytest.mark.parametrize("tenant", ["owner", "a b", ""])
def test_no_key_is_made_for_a_name_that_a_key_file_cannot_have(tenant: str) -> None:
    with pytest.raises(ConfigError, match=f'tenant "{tenant}"'):
        key.run(tenant)
