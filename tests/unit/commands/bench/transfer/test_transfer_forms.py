"""The forms of KV over a simulated network: what is sent, and how long it takes."""

from __future__ import annotations

import pytest

from pdserve.commands.bench.transfer.config import TransferConfig
from pdserve.commands.bench.transfer.forms import FORMS, LAYOUT, measure_forms
from pdserve.shared.errors import ConfigError
from pdserve.shared.simulated_link import SimulatedLink


@pytest.mark.long
async def test_on_a_slow_network_fewer_bytes_take_less_time() -> None:
    rows = await measure_forms(SimulatedLink(bandwidth=5e6), 192)
    assert [row.form for row in rows] == list(FORMS)
    raw, lossless, *rounded = rows
    assert raw.sent_as == "raw"
    assert raw.sent_bytes == raw.kv_bytes == 192 * LAYOUT.token_bytes
    assert lossless.sent_bytes < 0.75 * raw.sent_bytes
    assert lossless.raw_ratio > 1.15
    for row in rounded:
        assert row.sent_bytes < 0.6 * raw.sent_bytes
        assert row.raw_ratio > 1.6


def test_what_is_no_link_is_refused() -> None:
    assert TransferConfig().simulated_link is None
    config = TransferConfig(link="* * bandwidth=1.25e8")
    assert config.simulated_link == SimulatedLink(bandwidth=1.25e8)
    with pytest.raises(ConfigError, match='--link: link "1Gb" should be as in'):
        _ = TransferConfig(link="1Gb").simulated_link
