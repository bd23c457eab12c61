"""What Dagster is told about a range that went through processors."""

from __future__ import annotations

from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES, pending
from deltaforge_dagster.state.records import Processed
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, held


def processed(number: int, **counts: int) -> Processed:
    """Return what a chain of one outbox made of a segment, and counted."""
    return Processed(number, "chain", f"{number}.out", "sum", "hash", 2, 50, {"outbox": counts})


def numbers(store: StateStore, asset: str) -> dict[str, object]:
    """Return what is due to be published about processors."""
    (due,) = [one for one in pending(store, NAME) if one.asset == asset]
    return {name: one for name, one in due.metadata.items() if name.startswith("processor/")}


def test_what_processors_counted_adds_up_over_a_range(sqlite_store: StateStore) -> None:
    """Once the last segment is processed, and never a part: numbers that plot, latency per call."""
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1, 2)
    first = processed(1, events_in=3, events_out=2, calls=1, busy_us=4_000, outbox_transformed=2)
    with sqlite_store.fenced(lease) as writer:
        writer.segments.add_processed([first])
    assert numbers(sqlite_store, CHANGES) == {}

    second = {"outbox_transformed": 1, "outbox_dropped:non_insert": 2}
    with sqlite_store.fenced(lease) as writer:
        writer.segments.add_processed(
            [processed(2, events_in=3, events_out=1, calls=3, busy_us=2_000, **second)]
        )
    deliver(sqlite_store, lease, "cache", 2)

    assert numbers(sqlite_store, "cache") == numbers(sqlite_store, CHANGES)
    assert numbers(sqlite_store, "cache") == {
        "processor/outbox/events_in": 6,
        "processor/outbox/events_out": 3,
        "processor/outbox/latency_seconds": 0.0015,
        "processor/outbox/outbox_dropped/non_insert": 2,
        "processor/outbox/outbox_transformed": 3,
    }


def test_pipelines_without_processors_say_nothing_of_them(sqlite_store: StateStore) -> None:
    """Nor do ranges from before the file named some."""
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)
    deliver(sqlite_store, lease, "cache", 1)
    assert numbers(sqlite_store, "cache") == {}

    with sqlite_store.fenced(lease) as writer:
        writer.segments.leave_as_captured(1)

    assert numbers(sqlite_store, "cache") == {}


def test_plots_are_of_what_somebody_watches(sqlite_store: StateStore) -> None:
    """Size, rates and lag come first by name, in which order Dagster plots a hundred numbers; what identifies is text."""
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1, 2)
    deliver(sqlite_store, lease, "cache", 2)

    for due in pending(sqlite_store, NAME):
        plotted = sorted(name for name, one in due.metadata.items() if not isinstance(one, str))
        assert plotted[:5] == [
            "bytes", "bytes_per_second", "events", "events_per_second", "lag_seconds"
        ]  # fmt: skip
        known = ("operations/", "segments", "sinks/", "tables/")
        assert all(name.startswith(known) for name in plotted[5:])
        # It would be shown as that of the whole asset.
        assert "dagster/row_count" not in due.metadata
        assert (due.metadata["first_segment"], due.metadata["last_segment"]) == ("1", "2")


def test_a_sink_that_was_added_later_says_since_when(sqlite_store: StateStore) -> None:
    """First of all, and only while ranges that it will never have are kept; other sinks do not say it."""
    lease = held(sqlite_store, "cache")
    capture(sqlite_store, lease, 1)
    sqlite_store.pipelines.register(NAME, "spec-2", ["cache", "late"], {"late": "tail"})
    capture(sqlite_store, lease, 2)
    deliver(sqlite_store, lease, "cache", 2)
    deliver(sqlite_store, lease, "late", 2)

    def first_words() -> dict[str, tuple[str, object]]:
        return {one.asset: next(iter(one.metadata.items())) for one in pending(sqlite_store, NAME)}

    assert [one.range for one in pending(sqlite_store, NAME) if one.asset == "late"] == [2]
    assert first_words()["late"] == ("since", "range 2; earlier ones are not for this sink")
    assert {first_words()[asset][0] for asset in ("cache", CHANGES)} == {"lag_seconds"}
    for asset in ("cache", CHANGES):
        sqlite_store.ranges.mark_published(NAME, 1, asset)
    sqlite_store.segments.expire(NAME, [1])
    assert sqlite_store.ranges.expire(NAME, [1]) == [1]
    assert first_words()["late"][0] == "lag_seconds"
