"""A process knows when its certificate ends, also after it was renewed."""

from __future__ import annotations

import datetime
import shutil
import time
from pathlib import Path

import pytest

from pdserve.wire.certificate_end import CertificateEnd
from pdserve.wire.security import CERT_FILE

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make

DAY_S = 86_400.0


def days_left(end: CertificateEnd) -> float:
    return (end.seconds() - time.time()) / DAY_S


def test_a_renewed_certificate_is_read_anew(tmp_path: Path) -> None:
    made = make(tmp_path, "node", ["127.0.0.1"], datetime.timedelta(days=3))
    end = CertificateEnd(made)
    assert days_left(end) == pytest.approx(3, abs=0.01)
    make(tmp_path, "node", ["127.0.0.1"], datetime.timedelta(days=90))
    assert days_left(end) == pytest.approx(90, abs=0.01)


def test_also_one_that_has_ended(tmp_path: Path) -> None:
    made = make(tmp_path, "coordinator", [], datetime.timedelta(minutes=-4))
    assert days_left(CertificateEnd(made)) < 0


def test_what_cannot_be_told_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(tmp_path / "ours", "node", [], datetime.timedelta(days=3))
    theirs = make(tmp_path / "theirs", "node", [], datetime.timedelta(days=3))
    shutil.copy(theirs / "ca.crt", made)
    end = CertificateEnd(made)
    assert [end.seconds(), end.seconds()] == [0, 0]
    assert "verify failed" in caplog.text
    (made / CERT_FILE).unlink()
    assert [end.seconds(), end.seconds()] == [0, 0]
    assert len(caplog.records) == 2


def test_without_certificates_nothing_ends() -> None:
    assert CertificateEnd(None).seconds() == 0
