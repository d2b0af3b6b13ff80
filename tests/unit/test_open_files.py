"""The file limit is raised as far as it can be, and never lowered."""

from __future__ import annotations

import resource

import pytest

from pdserve.shared.process.open_files import file_limit, raise_file_limit


def test_files_are_made_room_for_within_the_hard_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits[1]
    assert most == resource.RLIM_INFINITY or most > 1300
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, most))
        for num_files, soft_limit in ((500, 1000), (1256, 1256), (1000, 1256)):
            assert raise_file_limit(num_files) == file_limit() == soft_limit
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft_limit, most)
        if most != resource.RLIM_INFINITY:
            assert raise_file_limit(most + 1) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_limit_that_the_kernel_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_file_limit(2_000_000) == 1000
