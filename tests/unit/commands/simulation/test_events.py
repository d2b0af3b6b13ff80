"""Simulated time: events in order of their times, and simultaneous ones as they were scheduled."""

from __future__ import annotations

from functools import partial

from pdserve.commands.simulation.events import Events


def test_events_run_in_order_of_time_and_then_as_scheduled() -> None:
    events, seen = Events(), list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, events.now_s))

    def at_two() -> None:
        note("first at 2")
        events.soon(partial(note, "soon"))
        events.at(1.0, partial(note, "too late"))  # the time has passed: now
        events.after(0.0, partial(note, "after nothing"))
        events.after(0.5, partial(note, "later"))

    events.at(2.0, at_two)
    events.at(2.0, partial(note, "second at 2"))
    events.at(1.0, partial(note, "at 1"))
    assert not events.run(until_s=1.5)
    assert seen == [("at 1", 1.0)]
    assert events.now() == 1.5
    assert events.run(until_s=99.0)
    assert seen == [
        ("at 1", 1.0),
        ("first at 2", 2.0),
        ("second at 2", 2.0),  # it was scheduled before what the first one scheduled
        ("soon", 2.0),
        ("too late", 2.0),
        ("after nothing", 2.0),
        ("later", 2.5),
    ]
    assert events.now() == 2.5


def test_nothing_runs_after_the_stop() -> None:
    events = Events()
    events.at(1.0, events.stop)
    events.at(1.0, lambda: 1 / 0)
    assert not events.run()
    assert events.is_stopped
