"""What a coordinator knows of very many adapters."""

from __future__ import annotations

import tracemalloc

from coordinator.adapters.bounds import MAX_ADAPTERS
from coordinator.adapters.known import KnownAdapters, Version
from pdserve.shared.clock import ManualClock


def version(number: int, name: str = "") -> Version:
    digest = f"{number:032x}"
    return Version(name or f"adapter-{number}", f"/adapters/{number}", digest, 10**7, "", number)


def test_as_many_as_may_be_take_little_memory() -> None:
    tracemalloc.start()
    try:
        known = KnownAdapters(ManualClock(), lambda digest: False)
        for number in range(MAX_ADAPTERS):
            known.serve(version(number))
        per_name = tracemalloc.get_traced_memory()[0] / MAX_ADAPTERS
    finally:
        tracemalloc.stop()
    assert per_name < 2000
    assert [v.name for v in known.lately_used()[:2]] == ["adapter-1023", "adapter-1022"]


def test_a_digest_is_known_while_any_name_stands_for_it_or_it_is_needed() -> None:
    used = {version(1).digest}
    known = KnownAdapters(ManualClock(), used.__contains__)
    first, second = version(1, "one"), version(1, "two")
    known.serve(first)
    known.serve(second)
    known.retire("one")
    assert known.of_digest(first.digest) == second
    assert known.take_unneeded() == []
    known.serve(version(2, "two"))
    assert known.of_digest(first.digest) == second
    assert known.take_unneeded() == []
    used.clear()
    assert known.take_unneeded() == [first.digest]
    assert known.of_digest(first.digest) is None
    assert known.of_digest(version(2).digest) == version(2, "two")
