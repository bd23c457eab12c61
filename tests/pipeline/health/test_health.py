"""Whether a pipeline works: what is derived from file and store, and who notes what there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from deltaforge_dagster.assets.pipeline import health_evaluation
from deltaforge_dagster.config.file.load import (
    BrokenPipeline,
    LoadedPipeline,
    load_pipeline,
    load_pipelines,
)
from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionLost,
    SourceUnavailable,
    SpecError,
    StoreUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.storage import LocalStorage
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureFailure
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.health.health import Health, health, health_without_file
from deltaforge_dagster.pipeline.health.recorded import (
    capture_failed,
    capture_works,
    failure_of,
    findings_of,
    note_broken,
    note_findings,
    note_tick,
    source_answers,
)
from deltaforge_dagster.pipeline.health.source_watch import inspect_source
from deltaforge_dagster.pipeline.run import leased_work
from deltaforge_dagster.pipeline.run.leased_work import CaptureWatch
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import SourceLog
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.pipeline.control.test_catalog import FILE
from tests.state.make import new_segment, position, table

NAME = "filed"
GONE = PositionLost("the slot is gone")
REFUSED = SourceUnavailable("refused")


@pytest.fixture
def loaded(tmp_path: Path, sqlite_store: StateStore) -> LoadedPipeline:
    """A pipeline that the store knows."""
    (tmp_path / "filed.yaml").write_text(FILE)
    sqlite_store.pipelines.register(NAME, "hash", ["redis"])
    return load_pipeline(tmp_path / "filed.yaml")


@pytest.fixture
def watch(sqlite_store: StateStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], CaptureWatch]:
    """Make watches for which no trouble is brief."""
    monkeypatch.setattr(leased_work, "_BRIEF_SECONDS", 0.0)
    return lambda: CaptureWatch(sqlite_store, NAME)


def capture(
    error: DeltaforgeError | None, *, failed: bool, has_read: bool, has_written: bool = False
) -> Capture:
    """Return what a watch sees of a capture; it tries again in a minute."""
    now = time.monotonic()
    failure = None if error is None else CaptureFailure(error, now, None if failed else now + 60, 1)
    seen = SimpleNamespace(failure=failure, has_read=has_read, has_written=has_written)
    return cast(Capture, seen)


def texts(found: Health) -> list[tuple[str, str, str]]:
    """Return what is wrong: severity, subject, text."""
    return [(one.severity, one.subject, one.text) for one in found.problems]


def test_what_people_want_is_the_status(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """A failure shows only while the pipeline is to run; a broken file always."""
    assert health(sqlite_store, loaded) == Health("running")
    capture_failed(sqlite_store, NAME, "tick", GONE, None)
    found = health(sqlite_store, loaded)
    assert (found.status, found.error, found.well) == ("failed", "the slot is gone", False)
    sqlite_store.pipelines.set_desired_state(NAME, "paused")
    assert health(sqlite_store, loaded) == Health("paused")
    sqlite_store.pipelines.set_desired_state(NAME, "stopped")
    assert health(sqlite_store, loaded) == Health("stopped")
    broken = BrokenPipeline(None, NAME, SpecError("odd"))
    found = health(sqlite_store, broken)
    assert (found.status, texts(found)) == ("failed", [("error", "file", "odd")])


def test_a_source_that_is_down_is_said_with_the_next_attempt(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """Nothing is captured meanwhile, so that the pipeline is not running; the next tick may end it."""
    capture_failed(sqlite_store, NAME, "tick", REFUSED, 12345.0)
    found = health(sqlite_store, loaded)
    assert found.status == "failed"
    assert texts(found) == [("error", "source", "refused")]
    assert found.problems[0].next_attempt_at == 12345.0
    capture_works(sqlite_store, NAME, "tick")
    assert health(sqlite_store, loaded) == Health("running")


def test_a_tick_takes_back_what_a_tick_said(
    sqlite_store: StateStore, loaded: LoadedPipeline, watch: Callable[[], CaptureWatch]
) -> None:
    """But not what a run met and only a person can end: a tick does not read the log."""
    capture_failed(sqlite_store, NAME, "tick", GONE, None)
    capture_works(sqlite_store, NAME, "tick")
    assert health(sqlite_store, loaded).status == "running"

    watch().poll(capture(UnsupportedEvent("odd event"), failed=True, has_read=True))
    capture_works(sqlite_store, NAME, "tick")
    capture_failed(sqlite_store, NAME, "tick", GONE, None)
    assert health(sqlite_store, loaded).error == "odd event"


def test_a_tick_that_can_use_the_source_ends_a_runs_outage_but_not_a_journals(
    sqlite_store: StateStore, loaded: LoadedPipeline, watch: Callable[[], CaptureWatch]
) -> None:
    """What a run could not write, no look at the source shows to be over."""
    watch().poll(capture(REFUSED, failed=False, has_read=False))
    assert health(sqlite_store, loaded).status == "failed"
    capture_works(sqlite_store, NAME, "tick")
    assert health(sqlite_store, loaded).status == "running"

    watch().poll(capture(StoreUnavailable("no space"), failed=False, has_read=False))
    capture_works(sqlite_store, NAME, "tick")
    assert texts(health(sqlite_store, loaded)) == [("error", "journal", "no space")]
    capture_works(sqlite_store, NAME, "run")
    assert health(sqlite_store, loaded).status == "running"


def test_a_journal_that_cannot_be_written(
    sqlite_store: StateStore, loaded: LoadedPipeline, watch: Callable[[], CaptureWatch]
) -> None:
    """It is over when a run has written, not when one reads; a tick's own finding is over at the next tick."""
    full = StoreUnavailable("no space")
    watch().poll(capture(full, failed=False, has_read=True))
    later = watch()
    later.poll(capture(None, failed=False, has_read=True))
    assert health(sqlite_store, loaded).error == "no space"
    later.poll(capture(None, failed=False, has_read=True, has_written=True))
    assert health(sqlite_store, loaded).status == "running"

    watch().poll(capture(full, failed=False, has_read=True))
    since = health(sqlite_store, loaded).problems[0].since
    capture_failed(sqlite_store, NAME, "tick", REFUSED, 12345.0)
    assert health(sqlite_store, loaded).error == "no space"
    capture_failed(sqlite_store, NAME, "tick", StoreUnavailable("no rights"), 12345.0)
    found = health(sqlite_store, loaded).problems[0]
    assert (found.text, found.since, found.next_attempt_at) == ("no rights", since, 12345.0)
    capture_works(sqlite_store, NAME, "tick")
    assert health(sqlite_store, loaded).status == "running"


def test_a_run_takes_back_what_anybody_said(
    sqlite_store: StateStore, loaded: LoadedPipeline, watch: Callable[[], CaptureWatch]
) -> None:
    """Once it has read; that it began says nothing."""
    capture_failed(sqlite_store, NAME, "tick", GONE, None)
    one = watch()
    one.poll(None)
    one.poll(capture(None, failed=False, has_read=False))
    assert health(sqlite_store, loaded).error == "the slot is gone"
    one.poll(capture(REFUSED, failed=False, has_read=True))
    found = health(sqlite_store, loaded)
    assert found.error == "refused"
    assert found.problems[0].next_attempt_at == pytest.approx(sqlite_store.now() + 60, abs=30)
    one.poll(capture(None, failed=False, has_read=True))
    assert health(sqlite_store, loaded).status == "running"


def test_a_brief_outage_is_no_news(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """A connection that breaks and is back changes nothing."""
    one = CaptureWatch(sqlite_store, NAME)
    one.poll(capture(REFUSED, failed=False, has_read=True))
    assert health(sqlite_store, loaded).status == "running"


def test_an_answer_ends_an_outage(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """But not what only a person can end."""
    for error, status in ((REFUSED, "running"), (GONE, "failed")):
        capture_failed(sqlite_store, NAME, "tick", error, 12345.0)
        source_answers(sqlite_store, NAME)
        assert health(sqlite_store, loaded).status == status


def test_a_failure_that_comes_again_is_as_old_as_the_first(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A run every few seconds that meets the same is one failure, also where the message differs."""
    since = []
    for number in range(2):
        CaptureWatch(sqlite_store, loaded.name).poll(
            capture(UnsupportedEvent(f"odd event {number}"), failed=True, has_read=True)
        )
        row = sqlite_store.pipelines.get(NAME)
        assert row is not None
        failure = failure_of(row)
        assert failure is not None
        since.append(failure.since)
    assert since[0] == since[1]


def test_what_the_source_does_not_send(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """An error fails the pipeline, with the statement; a warning does not; what is as needed is not noted."""
    gap = Finding("publication", "error", "does not send t", "ALTER PUBLICATION p ADD TABLE t")
    bare = Finding("replica identity", "warning", "not captured: u")
    note_findings(sqlite_store, NAME, [bare, gap, Finding("slot", "ok", "is there")])
    found = health(sqlite_store, loaded)
    assert found.status == "failed"
    assert texts(found) == [
        ("error", "publication", "does not send t"),
        ("warning", "replica identity", "not captured: u"),
    ]
    assert found.problems[0].remedy == ("ALTER PUBLICATION p ADD TABLE t",)
    first = found.problems[1].since

    note_findings(sqlite_store, NAME, [bare])
    found = health(sqlite_store, loaded)
    assert (found.status, found.well, found.problems[0].since) == ("running", True, first)
    note_findings(sqlite_store, NAME, [])
    assert health(sqlite_store, loaded).problems == ()


def test_looks_that_find_the_same_are_seldom_written(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A tick every few seconds writes only now and then that it has been."""
    del loaded
    note_findings(sqlite_store, NAME, [])
    note_tick(sqlite_store, NAME)
    before = sqlite_store.pipelines.get(NAME)
    note_findings(sqlite_store, NAME, [])
    note_tick(sqlite_store, NAME)
    assert sqlite_store.pipelines.get(NAME) == before
    note_findings(sqlite_store, NAME, [Finding("slot", "warning", "short")])
    row = sqlite_store.pipelines.get(NAME)
    assert row is not None
    assert [one.text for one in findings_of(row)] == ["short"]


def test_silence_of_a_sensor_is_an_error(
    sqlite_store: StateStore, loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sensor has looked before; a pipeline that only commands work on is not missed."""
    now = sqlite_store.now()
    monkeypatch.setattr(type(sqlite_store.database), "now", lambda _self: now + 600)
    assert health(sqlite_store, loaded).well
    monkeypatch.setattr(type(sqlite_store.database), "now", lambda _self: now)
    note_tick(sqlite_store, NAME)
    assert health(sqlite_store, loaded) == Health("running", (), now)

    monkeypatch.setattr(type(sqlite_store.database), "now", lambda _self: now + 600)
    found = health(sqlite_store, loaded)
    assert (found.status, found.seen_at) == ("failed", now)
    assert found.problems[0].subject == "sensor"
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    assert health(sqlite_store, loaded).status == "running"


def test_definitions_that_wait_for_reload(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Said from the first tick that finds them older than the file, until one finds them as new."""
    note_tick(sqlite_store, NAME)
    assert health(sqlite_store, loaded).problems == ()
    note_tick(sqlite_store, NAME, outdated=True)
    (problem,) = health(sqlite_store, loaded).problems
    assert (problem.subject, problem.severity) == ("definitions", "warning")
    assert "press Reload" in problem.text
    note_tick(sqlite_store, NAME, outdated=True)
    assert health(sqlite_store, loaded).problems == (problem,)
    note_tick(sqlite_store, NAME)
    assert health(sqlite_store, loaded).problems == ()


def test_a_pipeline_that_nobody_has_begun(tmp_path: Path, sqlite_store: StateStore) -> None:
    """It has a file, and nothing works on it."""
    (tmp_path / "filed.yaml").write_text(FILE)
    found = health(sqlite_store, load_pipeline(tmp_path / "filed.yaml"))
    assert (found.status, found.well) == ("running", True)
    assert "nothing has worked on it yet" in found.problems[0].text
    assert found.problems[0].since == (tmp_path / "filed.yaml").stat().st_mtime


@pytest.mark.parametrize(("failing", "severity"), [("a", "warning"), ("ab", "error")])
def test_a_quorum_of_sinks(
    sqlite_store: StateStore, tmp_path: Path, failing: str, severity: str
) -> None:
    """A sink that fails is an error only while too few others work."""
    sinks = "".join(
        f"    - {{type: redis, config: {{id: {one}, uri: 'redis://localhost', stream: s}}}}\n"
        for one in "abc"
    )
    text = f"{FILE.partition('  sinks:')[0]}  commit_policy: {{mode: quorum, quorum: 2}}\n  sinks:\n{sinks}"
    (tmp_path / "filed.yaml").write_text(text)
    sqlite_store.pipelines.register(NAME, "hash", list("abc"))
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        for one in failing:
            writer.checkpoints.failed(one, f"{one} refused", 7.0)
    found = health(sqlite_store, load_pipeline(tmp_path / "filed.yaml"))
    assert [one.severity for one in found.problems] == [severity] * len(failing)


def test_sinks_that_fail(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """An error where the commit policy waits for the sink, also where the file is not at hand."""
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.failed("redis", "connection refused", 7.0)
    found = health(sqlite_store, loaded)
    assert (found.status, found.well) == ("running", False)
    assert texts(found) == [("error", "sink redis", "connection refused")]
    assert found.problems[0].next_attempt_at is not None
    since = found.problems[0].since
    assert since is not None
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.failed("redis", "timed out", 8.0)
    assert health(sqlite_store, loaded).problems[0].since == since
    row = sqlite_store.pipelines.get(NAME)
    assert row is not None
    assert texts(health_without_file(sqlite_store, row)) == [("error", "sink redis", "timed out")]
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.advance("redis", 0, -1, True, None)
    assert health(sqlite_store, loaded).problems == ()
    assert sqlite_store.checkpoints.read(NAME)["redis"].failing_since is None


def test_an_outage_of_every_sink_is_named_once(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Sinks that fail for the same reason are one problem, tried again when the first of them is; others stay."""
    path = tmp_path / "filed.yaml"
    more = "".join(
        f'    - {{type: redis, config: {{id: {name}, uri: "redis://localhost", stream: s}}}}\n'
        for name in ("second", "third")
    )
    path.write_text(FILE.rstrip() + f"\n{more}")
    loaded = load_pipeline(path)
    register(sqlite_store, loaded)
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.failed("redis", "sink redis: connection refused", 9.0)
        writer.checkpoints.failed("second", "sink second: connection refused", 7.0)
        writer.checkpoints.failed("third", "sink third: timed out", 8.0)
    found = health(sqlite_store, loaded)
    assert texts(found) == [
        ("error", "sinks redis, second", "connection refused"),
        ("error", "sink third", "timed out"),
    ]
    assert found.problems[0].next_attempt_at == 7.0


def test_tables_whose_older_rows_lack_a_column(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A warning with the command that loads the table again, until it is done or the source drops the column."""
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.register(NAME, table("id", "c"), position(1))
    columns = sqlite_store.schemas.history(NAME, "public.orders").newest.columns
    write = TableWrite(
        ("public", "orders"), ("lake", "orders"), (), 1, "{}", 0.0,
        lacking=(columns.identities["c"],),
    )  # fmt: skip
    with sqlite_store.fenced(lease) as writer:
        writer.table_commits.restart("redis", 0)
        writer.table_commits.advance("redis", 1, (), [write])
    (problem,) = health(sqlite_store, loaded).problems
    assert (problem.severity, problem.subject) == ("warning", "sink redis")
    assert problem.text == (
        "rows of lake.orders that were there when the source's table got column c, or another type for it, have null or "
        "their former values there: what the source gave them is not in its log"
    )
    assert problem.remedy == (f"deltaforge resync {NAME} --sink redis --tables public.orders",)
    with sqlite_store.fenced(lease) as writer:
        writer.schemas.register(NAME, table("id"), position(2))
    assert health(sqlite_store, loaded).problems == ()


def test_since_when_a_file_is_broken(
    sqlite_store: StateStore,
    loaded: LoadedPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Since the first tick that found it so, however often it is edited; before that, since it was edited or used."""
    assert loaded.path is not None
    edited, used = 1_000.0, sqlite_store.now()

    def since(now: float) -> float | None:
        monkeypatch.setattr(type(sqlite_store.database), "now", lambda _self: now)
        broken = BrokenPipeline(loaded.path, NAME, SpecError("odd"))
        return health(sqlite_store, broken).problems[0].since

    os.utime(loaded.path, (edited, edited))
    assert since(used) == edited
    note_tick(sqlite_store, NAME)
    assert since(used) == used, "a variable of the environment may be missing since then"
    note_broken(sqlite_store, NAME)
    noted = since(used)
    assert noted is not None
    assert noted == pytest.approx(used, abs=30)
    os.utime(loaded.path, (noted + 60, noted + 60))
    note_broken(sqlite_store, NAME)
    assert since(noted + 90) == noted

    note_tick(sqlite_store, NAME)
    assert since(noted + 100) == noted + 90, "it was in order meanwhile"
    new = BrokenPipeline(tmp_path / "gone.yaml", "gone", SpecError("odd"))
    assert health(sqlite_store, new).problems[0].since is None


def test_a_variable_that_this_process_lacks(
    sqlite_store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process with the variable reports counts, until that one finds the file broken, or is silent."""
    path = tmp_path / "filed.yaml"
    path.write_text(re.sub(r'dsn: "[^"]*"', 'dsn: "${SHOP_DSN}"', FILE))
    monkeypatch.setenv("SHOP_DSN", "postgres://app@db/shop")
    there = load_pipeline(path)
    register(sqlite_store, there)
    note_tick(sqlite_store, NAME)
    capture_failed(sqlite_store, NAME, "run", GONE, None)
    monkeypatch.delenv("SHOP_DSN")
    (here,) = load_pipelines(path)
    assert isinstance(here, BrokenPipeline)
    assert here.unset == ("SHOP_DSN",)
    note = (
        "warning",
        "file",
        "this process cannot check the file, because it lacks SHOP_DSN; what the process that works on it reports is shown",
    )
    shown = health(sqlite_store, here)
    assert (shown.status, shown.well) == ("failed", False)
    assert texts(shown) == [("error", "source", "the slot is gone"), note]
    capture_works(sqlite_store, NAME, "run")
    assert texts(health(sqlite_store, here)) == [note]
    assert health(sqlite_store, here).well
    later = sqlite_store.now() + 100
    with monkeypatch.context() as patch:
        patch.setattr(type(sqlite_store.database), "now", lambda _self: later)
        assert "SHOP_DSN" in (health(sqlite_store, here).error or "")
    note_broken(sqlite_store, NAME)
    assert "SHOP_DSN" in (health(sqlite_store, here).error or "")


def test_since_when_capture_is_paused(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """Since the pause began, also where its reason changes; the next pause has its own time."""
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None

    def pause(why: str | None) -> None:
        with sqlite_store.fenced(lease) as writer:
            writer.pipeline.set_capture_pause(why)

    pause("the journal is full")
    (problem,) = health(sqlite_store, loaded).problems
    assert problem.text == "capture is paused: the journal is full"
    assert problem.since == pytest.approx(sqlite_store.now(), abs=30)
    time.sleep(0.01)
    pause("the journal is very full")
    assert health(sqlite_store, loaded).problems[0].since == problem.since
    pause(None)
    assert health(sqlite_store, loaded).problems == ()
    pause("the journal is full")
    since = health(sqlite_store, loaded).problems[0].since
    assert since is not None
    assert problem.since is not None
    assert since > problem.since


def test_since_when_a_sink_is_detached_or_has_a_notice(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A sink that failed before it was detached gets nothing since it failed."""
    lease = sqlite_store.leases.acquire(NAME, "run", 900.0)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.detach("redis", "detached: the journal is full")
        writer.checkpoints.set_notice("redis", "it had lost data")
    problems = health(sqlite_store, loaded).problems
    assert [one.text for one in problems] == ["detached: the journal is full", "it had lost data"]
    for one in problems:
        assert one.since == pytest.approx(sqlite_store.now(), abs=30)
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.set_notice("redis", "it had lost data")
    assert health(sqlite_store, loaded).problems == problems
    assert sqlite_store.checkpoints.attach(NAME, "redis", tail=True).failing_since is None

    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.failed("redis", "refused", 7.0)
    failing = health(sqlite_store, loaded).problems[0].since
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.detach("redis", "detached")
    assert health(sqlite_store, loaded).problems[0].since == failing


def test_a_full_disk_is_an_error_of_a_tick_until_there_is_room(
    sqlite_store: StateStore,
    loaded: LoadedPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a run captures in vain; the message says what to do."""
    start = LsnPosition(lsn=1).to_json()
    sqlite_store.pipelines.set_start(NAME, start)
    journal = Journal((tmp_path / "journal").as_uri())
    source = cast(Source, SimpleNamespace(maintain=lambda _after: [], close=lambda: None))

    def look() -> Health:
        inspect_source(sqlite_store, loaded, lambda: source, journal, 12345.0)
        return health(sqlite_store, loaded)

    assert look() == Health("running", (), look().seen_at)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "free_bytes", lambda *_: 1000)
        (problem,) = look().problems
        assert (problem.subject, problem.severity) == ("journal", "error")
        assert problem.text.startswith("no space left for the journal in ")
        assert "free space there" in problem.text
        assert problem.since is not None
        assert problem.next_attempt_at == 12345.0
    assert look().problems == ()


def test_a_journal_that_fills_up(loaded: LoadedPipeline, sqlite_store: StateStore) -> None:
    """A warning from half of its limit on, by what sinks lack; not by what is kept for replays, nor once capture is paused."""
    assert loaded.path is not None
    loaded.path.write_text(FILE + "  engine: {journal: {max_bytes: 400}}\n")
    limited = load_pipeline(loaded.path)
    sqlite_store.pipelines.set_start(NAME, position(0))
    lease = sqlite_store.leases.acquire(NAME, "run-1", 60)
    assert lease is not None

    def journal() -> list[str]:
        found = health(sqlite_store, limited).problems
        return [problem.text for problem in found if problem.subject.startswith("journal")]

    with sqlite_store.fenced(lease) as writer:
        number = writer.ranges.open(position(0), "spec-1", 1)
        for segment in (1, 2, 3):
            writer.segments.add(new_segment(segment), number)
        writer.checkpoints.advance("redis", 2, 2, True, position(2))
    assert journal() == []
    with sqlite_store.fenced(lease) as writer:
        writer.segments.add(new_segment(4), number)
    (text,) = journal()
    assert text.startswith("the journal has about 200 B that sinks lack, of at most 400 B (")
    with sqlite_store.fenced(lease) as writer:
        writer.pipeline.set_capture_pause("it is full")
    assert journal() == ["capture is paused: it is full"]


def test_the_check_leaves_out_what_always_changes(
    loaded: LoadedPipeline, sqlite_store: StateStore
) -> None:
    """Dagster keeps each text of the check `well`, so those of log and journal have no figures there."""

    def texts(retained: int) -> tuple[str, str | None]:
        log = SourceLog(0.0, 0, retained=retained, limit=100, limited_by="some_setting")
        sqlite_store.pipelines.note_source_log(NAME, log)
        found = health(sqlite_store, loaded)
        evaluation = health_evaluation(NAME, found)
        assert not evaluation.passed
        return found.problems[0].text, evaluation.description

    (before, said), (after, said_again) = texts(60), texts(61)
    assert before != after
    assert said == said_again
    assert "the server may soon remove what is needed" in str(said)
