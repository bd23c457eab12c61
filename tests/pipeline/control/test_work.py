"""The reasons to start a run, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.control.work import (
    MAX_PROBE_WAIT,
    NoWork,
    Work,
    find_work,
    next_probe,
    sensing_behind,
)
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import HoldPart, Lease, NewSegment
from deltaforge_dagster.state.sensing import Findings
from deltaforge_dagster.state.snapshot_records import PlannedChunk, StagedChunk
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.pipeline.changes import PlayedSource, transaction
from tests.state.make import dead_letter

PIPELINE = """\
metadata: {name: p, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: src, dsn: "postgres://u:pw@localhost/db", slot: s, publication: p, tables: [public.t]}
  sinks:
    - {type: file, config: {id: one, path: /tmp/one.jsonl}}
    - {type: file, config: {id: two, path: /tmp/two.jsonl}}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPipeline:
    """A pipeline with two sinks."""
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE)
    return load_pipeline(path)


def segment(number: int) -> NewSegment:
    """Return a segment of one change."""
    return NewSegment(
        segment=number,
        segment_id=f"id{number}",
        path=f"p/{number}",
        checksum="c",
        content_hash="h",
        rows=1,
        bytes=1,
        start_position=LsnPosition(number - 1).to_json(),
        end_position=LsnPosition(number).to_json(),
        counts={"public.t": {"c": 1}},
        schema_versions={"public.t": "v"},
        first_ts_us=1,
        last_ts_us=1,
    )


def capture_one(store: StateStore, lease: Lease, *, close: bool) -> None:
    """Journal one segment in one range."""
    with store.fenced(lease) as writer:
        number = writer.ranges.open(LsnPosition(0).to_json(), "hash", 1)
        writer.segments.add(segment(1), number)
        if close:
            writer.ranges.close(number, "test", "h")


def held(store: StateStore) -> Lease:
    """Take the lease."""
    lease = store.leases.acquire("p", "run-1", 30)
    assert lease is not None
    return lease


def test_the_first_look_fixes_the_start(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """A new pipeline's start position is fixed at once; nothing has happened yet."""
    found = find_work(sqlite_store, loaded, lambda: PlayedSource([]))

    row = sqlite_store.pipelines.get("p")
    assert isinstance(found, NoWork)
    assert row is not None
    assert row.start_position == LsnPosition(0).to_json()


def test_changes_beyond_the_captured_position_are_work(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """The source has changes: a run starts."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))

    found = find_work(sqlite_store, loaded, lambda: PlayedSource([transaction(5)]))

    assert isinstance(found, Work)
    assert found.reason == "changes"


def test_an_idle_source_is_no_work(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Nothing new in the source and nothing behind: no run."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))

    assert isinstance(find_work(sqlite_store, loaded, lambda: PlayedSource([])), NoWork)


def test_a_held_lease_means_no_second_run(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """While a run holds the lease there is nothing to start, whatever the source has."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    held(sqlite_store)

    found = find_work(sqlite_store, loaded, lambda: PlayedSource([transaction(5)]))

    assert isinstance(found, NoWork)
    assert "run-1" in found.detail


def test_a_range_left_open_is_work_without_asking_the_source(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A killed run left a range open: a run starts even while the source is down."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    lease = held(sqlite_store)
    capture_one(sqlite_store, lease, close=False)
    with sqlite_store.fenced(lease) as writer:
        writer.lease.release()

    found = find_work(sqlite_store, loaded, lambda: pytest.fail("the source was asked"))

    assert isinstance(found, Work)
    assert found.reason == "range open"


def test_a_sink_behind_is_work_once_its_back_off_has_passed(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A sink that is behind starts a run on an idle source, but not before its next attempt."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    lease = held(sqlite_store)
    capture_one(sqlite_store, lease, close=True)
    now = sqlite_store.now()
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.advance(
            "one", 1, 0, complete=True, source_position=LsnPosition(1).to_json()
        )
        writer.checkpoints.failed("two", "down", now + 60)
        writer.lease.release()
    assert isinstance(find_work(sqlite_store, loaded, lambda: PlayedSource([])), NoWork)

    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.failed("two", "down", now - 1)
        writer.lease.release()
    found = find_work(sqlite_store, loaded, lambda: PlayedSource([]))

    assert isinstance(found, Work)
    assert found == Work("sink behind", "sink two lacks 1 of the journal's segments")


def test_a_paused_pipeline_captures_nothing_but_still_delivers(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """Paused: changes start no run, a sink that is behind does; stopped: neither does."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    sqlite_store.pipelines.set_desired_state("p", "paused")
    busy = PlayedSource([transaction(5)])
    assert isinstance(find_work(sqlite_store, loaded, lambda: busy), NoWork)

    lease = held(sqlite_store)
    capture_one(sqlite_store, lease, close=True)
    with sqlite_store.fenced(lease) as writer:
        writer.lease.release()
    assert isinstance(find_work(sqlite_store, loaded, lambda: busy), Work)

    sqlite_store.pipelines.set_desired_state("p", "stopped")
    assert isinstance(find_work(sqlite_store, loaded, lambda: busy), NoWork)


def test_a_full_journal_captures_nothing_until_a_sink_may_drain_it(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """Changes start no run while a sink in back-off holds the journal, and do once all have it."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    busy = PlayedSource([transaction(5)])
    lease = held(sqlite_store)
    capture_one(sqlite_store, lease, close=True)
    end = LsnPosition(1).to_json()
    with sqlite_store.fenced(lease) as writer:
        writer.pipeline.set_capture_pause("the journal is full")
        writer.checkpoints.advance("one", 1, 0, complete=True, source_position=end)
        writer.checkpoints.failed("two", "down", sqlite_store.now() + 60)
        writer.lease.release()
    assert find_work(sqlite_store, loaded, lambda: busy) == NoWork(
        "capture is paused: the journal is full"
    )

    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.detach("two", "detached")
        writer.lease.release()
    found = find_work(sqlite_store, loaded, lambda: busy)

    assert isinstance(found, Work)
    assert found.reason == "changes"


def test_empty_runs_make_the_next_look_wait_longer(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """After each empty run the wait doubles, up to a minute; one capture ends it."""
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    waits = []
    for _ in range(6):
        next_probe(sqlite_store, "p", captured=False)
        row = sqlite_store.pipelines.get("p")
        assert row is not None
        waits.append(row.probe_wait)
    found = find_work(sqlite_store, loaded, lambda: pytest.fail("the source was asked"))
    next_probe(sqlite_store, "p", captured=True)

    assert waits == [5, 10, 20, 40, MAX_PROBE_WAIT, MAX_PROBE_WAIT]
    assert isinstance(found, NoWork)
    assert isinstance(find_work(sqlite_store, loaded, lambda: PlayedSource([transaction(5)])), Work)


def test_a_released_hold_is_work(store: StateStore, loaded: LoadedPipeline) -> None:
    """What is held waits for a person; once released it waits for a run, if the source is quiet."""
    source = PlayedSource([])
    find_work(store, loaded, lambda: source)
    lease = held(store)
    kept = HoldPart("table", "public.t", "why", LsnPosition(0).to_json(), "path", "sum", 1, 1)
    with store.fenced(lease) as writer:
        writer.holds.keep([kept], LsnPosition(0).to_json())
        writer.lease.release()
    assert isinstance(find_work(store, loaded, lambda: source), NoWork)

    store.holds.release("p", "table", "public.t", "{}")
    found = find_work(store, loaded, lambda: source)
    assert isinstance(found, Work)
    assert found.reason == "hold released"
    store.pipelines.set_desired_state("p", "paused")
    assert isinstance(find_work(store, loaded, lambda: source), NoWork)


def test_chunks_that_were_read_are_work(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """They wait for a run that takes them over; those of a held table for the end of the hold."""
    source = PlayedSource([])
    find_work(sqlite_store, loaded, lambda: source)
    number = sqlite_store.snapshots.request("p", cause="command").snapshot
    chunk = PlannedChunk("public.t", 1, "{}")
    sqlite_store.snapshots.plan("p", number, [chunk])
    assert isinstance(find_work(sqlite_store, loaded, lambda: source), NoWork)
    end = LsnPosition(0).to_json()
    staged = StagedChunk("path", "sum", 1, 1, "sight", end, "{}", 1, 0.1)
    sqlite_store.snapshots.stage("p", number, chunk, staged)
    found = find_work(sqlite_store, loaded, lambda: source)
    assert isinstance(found, Work)
    assert found.reason == "chunks read"

    with sqlite_store.fenced(held(sqlite_store)) as writer:
        writer.holds.keep([HoldPart("table", "public.t", "why", end, "path", "sum", 1, 1)], end)
        writer.lease.release()
    assert isinstance(find_work(sqlite_store, loaded, lambda: source), NoWork)


def test_a_table_to_load_again_is_work(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Not while another snapshot is unfinished; but then, if it has begun, because its table must be recreated."""
    source = PlayedSource([])

    def found() -> str | None:
        work = find_work(sqlite_store, loaded, lambda: source)
        return work.reason if isinstance(work, Work) else None

    assert found() is None
    sqlite_store.table_commits.resync("p", "one", {("t",): "public.t"})
    other = sqlite_store.snapshots.request("p", cause="command")
    reasons = [found()]
    sqlite_store.snapshots.cancel("p", other.snapshot, "no longer wanted")
    reasons.append(found())
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        writer.table_commits.restart("one", 0)
        writer.table_commits.begin_resyncs("one", [("t",)])
        writer.lease.release()
    reasons.append(found())
    sqlite_store.checkpoints.pause("p", "one")
    reasons.append(found())
    sqlite_store.checkpoints.resume("p", "one")
    with sqlite_store.fenced(held(sqlite_store)) as writer:
        writer.table_commits.recreated("one", ("public", "t"), ("t",), ())
        writer.lease.release()
    assert [*reasons, found()] == [None, "resync", "resync", None, None]


def test_dead_letters_that_are_due(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Asked for, or behind nothing any more: once the checkpoint has passed them, and not before."""
    store = sqlite_store
    find_work(store, loaded, lambda: PlayedSource([]))
    lease = store.leases.acquire("p", "r", 60)
    assert lease is not None
    capture_one(store, lease, close=True)
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("two", 1, 0, True, LsnPosition(1).to_json())
        letter = dead_letter(0, holds=True)
        writer.dead_letters.add("one", [letter], max_entries=9, overflow="block")
        writer.dead_letters.add("two", [letter], max_entries=9, overflow="block")
        writer.lease.release()
    store.dead_letters.redrive("p")

    def found() -> str:
        work = find_work(store, loaded, lambda: PlayedSource([]))
        return work.reason if isinstance(work, Work) else "none"

    assert found() == "sink behind"
    lease = store.leases.acquire("p", "r", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("one", 1, 0, True, LsnPosition(1).to_json())
        writer.lease.release()
    assert found() == "dead letters"
    store.dead_letters.remove("p", sink="one")
    assert found() == "dead letters"
    store.dead_letters.remove("p")
    assert found() != "dead letters"


def test_pending_changes_that_are_old(sqlite_store: StateStore, tmp_path: Path) -> None:
    """They are folded by a run although there is nothing else to do, unless the sink is paused or waits after a failure."""
    store, path = sqlite_store, tmp_path / "p.yaml"
    sink = "{type: delta, config: {id: lake, path: /tmp/lake, pending: {fold_changes: 9, fold_seconds: S}}}"

    def found(options: str, seconds: float = 3600) -> str:
        path.write_text(PIPELINE + f"    - {options.replace('S}', f'{seconds}}}')}\n")
        work = find_work(store, load_pipeline(path), lambda: PlayedSource([]))
        return work.detail if isinstance(work, Work) else "none"

    found(sink)
    lease = held(store)
    destination = ("public", "t")
    write = TableWrite(("public", "t"), destination, (), 5, "{}", 0.0, pending=True)
    with store.fenced(lease) as writer:
        writer.table_commits.restart("lake", 0)
        writer.table_commits.plan_pending("lake", {destination: ("db", "public", "t")}, 1)
        writer.lease.release()
    assert "folded" not in found(sink, 1e-9)  # nothing is sure to be among them
    with store.fenced(held(store)) as writer:
        writer.table_commits.advance("lake", 1, (), [write])
        writer.lease.release()
    assert "folded" not in found(sink)
    assert found(sink, 1e-9) == "pending changes of table public.t of sink lake are to be folded"
    assert "folded" in found("{type: delta, config: {id: lake, path: /tmp/lake}}")
    store.checkpoints.pause("p", "lake")
    assert "folded" not in found(sink, 1e-9)


def test_segments_that_are_not_sensed_are_work(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Once sensing has begun; not while it fails, which only another run's work can show to be over."""
    path = tmp_path / "p.yaml"
    path.write_text(PIPELINE + "  schema_sensing: {enabled: true}\n")
    loaded = load_pipeline(path)
    find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.note(Findings(0))
    capture_one(sqlite_store, lease, close=True)
    with sqlite_store.fenced(lease) as writer:
        for sink in ("one", "two"):
            writer.checkpoints.advance(sink, 1, 0, True, None)
        writer.lease.release()

    found = find_work(sqlite_store, loaded, lambda: PlayedSource([]))
    assert isinstance(found, Work)
    assert (found.reason, found.detail) == ("sensing", "sensing lacks 1 of the journal's segments")
    assert sensing_behind(sqlite_store, load_pipeline(path)) == 1

    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.fail("no idea")
        writer.lease.release()
    assert isinstance(find_work(sqlite_store, loaded, lambda: PlayedSource([])), NoWork)
    lease = held(sqlite_store)
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.note(Findings(1))
        writer.lease.release()
    assert isinstance(find_work(sqlite_store, loaded, lambda: PlayedSource([])), NoWork)
    assert sensing_behind(sqlite_store, loaded) == 0
