"""The end of the certificate that a server shows, from a real handshake."""

from __future__ import annotations

import datetime
import ssl
import time
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.cli.doctor.cluster.https import https_end
from pdserve.errors import ClusterError

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.cli.certs import make

DAYS = 10


async def test_the_end_of_the_certificate_is_read_if_it_is_to_be_trusted(tmp_path: Path) -> None:
    made = make(tmp_path, "coordinator", ["127.0.0.1"], datetime.timedelta(days=DAYS))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made / "tls.crt", made / "tls.key")
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        ends_at = await https_end(url, ssl.create_default_context(cafile=made / "ca.crt"))
        assert ends_at is not None
        assert (ends_at - time.time()) / 86_400 == pytest.approx(DAYS, abs=0.01)
        with pytest.raises(ClusterError, match="verify failed"):
            await https_end(url)
    finally:
        await runner.cleanup()
    with pytest.raises(ClusterError, match="no certificate from"):
        await https_end(url)


async def test_http_has_none() -> None:
    assert await https_end("http://127.0.0.1:1") is None
