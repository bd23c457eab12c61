"""When `confirm: auto` lets the source forget what only the journal has, over a real store, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.run import confirmer
from deltaforge_dagster.pipeline.run.confirmer import Confirmer
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import EarlyConfirmation, Lease, SourceLog
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, position

MIB = 1 << 20
PIPELINE = """
metadata: {{name: orders, tenant: acme}}
spec:
  source: {{type: postgres, config: {{id: s, dsn: "postgres://u@localhost/x", slot: s,
    publication: p, tables: [public.orders]}}}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost", stream: x}}}}
    - {{type: file, config: {{id: lines, path: /tmp/lines, required: false}}}}
  engine: {{journal: {{{journal}}}}}
"""
TOO_MUCH = SourceLog(0.0, 0, retained=33 * MIB, unconfirmed=32 * MIB)
DURABLE = "durable_disk: true, confirm_above: 33554432"


class Confirming:
    """A pipeline whose sink `redis` has the first of three segments, and how its log is confirmed."""

    def __init__(self, store: StateStore, folder: Path, journal: str) -> None:
        self.store = store
        self.warned: list[str] = []
        path = folder / "orders.yaml"
        path.write_text(PIPELINE.format(journal=journal))
        self.loaded = load_pipeline(path)
        store.pipelines.register(NAME, "spec-1", ["redis", "lines"])
        store.pipelines.set_start(NAME, position(0))
        lease = ActiveLease.acquire(
            store, NAME, "run-1", seconds=60, renew_seconds=20, on_renewal=lambda: None
        )
        assert lease is not None
        self.lease = lease
        self.fence = Lease(NAME, "run-1", lease.epoch, 0.0)
        self.url = folder.joinpath("journal").as_uri()
        capture(store, self.fence, 1, 2, 3)
        self.deliver(1)
        self.begin()

    def begin(self) -> None:
        """Let another run begin."""
        run = LeasedRun(self.store, Journal(self.url), self.lease, self.warned.append)
        self.confirmer = Confirmer(self.loaded, run)

    def deliver(self, segment: int) -> None:
        """Let the required sink have everything up to a segment."""
        deliver(self.store, self.fence, "redis", segment)

    def confirmed(self, log: SourceLog | None = None, *, age: float = 0.0) -> str | None:
        """Confirm, after a look at the log so many seconds ago; return the stored position."""
        if log is not None:
            seen = SourceLog(**{**_fields(log), "seen_at": self.store.now() - age})
            self.store.pipelines.note_source_log(NAME, seen)
        self.confirmer.confirm(None)
        row = self.store.pipelines.get(NAME)
        assert row is not None
        return row.confirmed_position

    def early(self) -> EarlyConfirmation | None:
        """What the store says."""
        return self.store.pipelines.early_confirmation(NAME)


def _fields(log: SourceLog) -> dict[str, Any]:
    return {name: getattr(log, name) for name in SourceLog.__slots__}


@pytest.fixture
def confirming(
    sqlite_store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Confirming]]:
    """Make a pipeline with these fields of `engine.journal`; it decides whenever it is asked."""
    monkeypatch.setattr(confirmer, "_DECIDE_SECONDS", 0.0)
    monkeypatch.setattr(confirmer, "_CAUGHT_UP_SECONDS", 0.0)
    made: list[Confirming] = []

    def make(journal: str) -> Confirming:
        made.append(Confirming(sqlite_store, tmp_path, journal))
        return made[-1]

    yield make
    for one in made:
        one.lease.release()


def test_what_the_journal_has_is_confirmed_once_too_much_is_retained(
    confirming: Callable[[str], Confirming],
) -> None:
    """Until sinks have caught up, also in the runs that follow; what was confirmed stays so."""
    pipeline = confirming(DURABLE)
    assert pipeline.confirmed(SourceLog(0.0, 0, retained=32 * MIB, unconfirmed=32 * MIB)) == (
        position(1)
    )
    assert pipeline.early() is None

    assert pipeline.confirmed(TOO_MUCH) == position(3)
    before = pipeline.early()
    assert before is not None
    assert before.why == (
        "the server retained 33.0 MiB for it, more than 32.0 MiB (engine.journal.confirm_above)"
    )
    assert pipeline.warned == [
        f"from now on the source's log is confirmed up to what the journal has: {before.why}"
    ]
    pipeline.begin()
    capture(pipeline.store, pipeline.fence, 4)
    assert pipeline.confirmed(SourceLog(0.0, 0, retained=MIB, unconfirmed=MIB)) == position(4)
    assert pipeline.early() == before

    pipeline.deliver(4)
    assert pipeline.confirmed() == position(4)
    assert pipeline.early() is None
    assert pipeline.warned[1:] == ["the source's log is confirmed as changes are delivered again"]
    capture(pipeline.store, pipeline.fence, 5)
    assert pipeline.confirmed(SourceLog(0.0, 0, retained=MIB, unconfirmed=MIB)) == position(4)


def test_it_ends_with_the_run_whose_sinks_have_caught_up(
    confirming: Callable[[str], Confirming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was decided a moment ago: no run may follow that would say so."""
    pipeline = confirming(DURABLE)
    pipeline.confirmed(TOO_MUCH)
    monkeypatch.setattr(confirmer, "_DECIDE_SECONDS", 1000.0)
    pipeline.confirmed()
    pipeline.deliver(3)
    pipeline.confirmed()
    assert pipeline.early() is not None
    pipeline.confirmer.confirm(None, last=True)
    assert pipeline.early() is None


def test_it_does_not_go_back_and_forth(
    confirming: Callable[[str], Confirming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a burst of writes, sinks are only seconds behind when it begins: it ends once the server has freed the log."""
    monkeypatch.setattr(confirmer, "_CAUGHT_UP_SECONDS", 1000.0)
    pipeline = confirming(DURABLE)
    for _ in range(3):
        assert pipeline.confirmed(TOO_MUCH) == position(3)
    assert len(pipeline.warned) == 1
    pipeline.confirmed(SourceLog(0.0, 0, retained=31 * MIB, unconfirmed=MIB))
    assert pipeline.early() is None
    assert len(pipeline.warned) == 2


@pytest.mark.parametrize(
    "log",
    [
        pytest.param(SourceLog(0.0, 0, unconfirmed=99 * MIB), id="a server that retains nothing"),
        pytest.param(
            SourceLog(0.0, 0, retained=99 * MIB, unconfirmed=MIB), id="an open transaction"
        ),
        pytest.param(
            SourceLog(0.0, 95 * MIB, retained=99 * MIB, unconfirmed=99 * MIB),
            id="a log that is not captured yet",
        ),
    ],
)
def test_what_would_free_nothing_confirms_nothing(
    confirming: Callable[[str], Confirming], log: SourceLog
) -> None:
    """Only log that the journal has is freed by confirming it."""
    pipeline = confirming(DURABLE)
    assert pipeline.confirmed(log) == position(1)
    assert pipeline.early() is None


def test_an_old_look_decides_nothing(confirming: Callable[[str], Confirming]) -> None:
    """While the server cannot be asked, nothing is known."""
    pipeline = confirming(DURABLE)
    assert pipeline.confirmed(TOO_MUCH, age=60) == position(1)
    assert pipeline.confirmed(TOO_MUCH, age=5) == position(3)


@pytest.mark.parametrize(
    ("limit", "retained", "expected"),
    [
        (100 * MIB, 25 * MIB, 1),
        (100 * MIB, 26 * MIB, 3),
        (None, 10 << 30, 1),
        (None, (10 << 30) + 1, 3),
    ],
)
def test_the_threshold_by_default(
    confirming: Callable[[str], Confirming], limit: int | None, retained: int, expected: int
) -> None:
    """A quarter of the server's limit, or 10 GiB."""
    pipeline = confirming("durable_disk: true")
    log = SourceLog(0.0, 0, retained=retained, unconfirmed=retained, limit=limit)
    assert pipeline.confirmed(log) == position(expected)


def test_a_threshold_above_the_limit(confirming: Callable[[str], Confirming]) -> None:
    """Does not wait until the log is lost: half of the server's limit is enough."""
    pipeline = confirming("durable_disk: true, confirm_above: 1073741824")
    log = SourceLog(0.0, 0, retained=51 * MIB, unconfirmed=51 * MIB, limit=100 * MIB)
    assert pipeline.confirmed(log) == position(3)


def test_sinks_that_are_behind_for_an_hour(
    confirming: Callable[[str], Confirming], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count as too much, however little it is; not sinks that the commit policy does not wait for."""
    pipeline = confirming(DURABLE)
    little = SourceLog(0.0, 0, retained=MIB, unconfirmed=MIB)
    assert pipeline.confirmed(little) == position(1)
    captured_at = pipeline.store.segments.read(NAME, first=2, limit=1)[0].created_at
    clock_at = captured_at + 3590
    monkeypatch.setattr(type(pipeline.store.database), "now", lambda _: clock_at)
    assert pipeline.confirmed(little) == position(1)
    clock_at += 20
    assert pipeline.confirmed(little) == position(3)
    early = pipeline.early()
    assert early is not None
    assert early.why == "sinks have lacked changes for more than an hour"


@pytest.mark.parametrize("journal", ["confirm_above: 33554432", "confirm: delivered"])
def test_what_is_not_durable_is_delivered_first(
    confirming: Callable[[str], Confirming], journal: str
) -> None:
    """On a disk of which the file says nothing, and where the file says `delivered`, nothing is confirmed early."""
    pipeline = confirming(journal)
    assert pipeline.confirmed(TOO_MUCH) == position(1)
    assert pipeline.early() is None


@pytest.mark.parametrize(
    ("journal", "expected"), [(DURABLE, 9), ("confirm: captured", 9), ("confirm: delivered", 1)]
)
def test_log_of_others_is_freed_as_well(
    confirming: Callable[[str], Confirming], journal: str, expected: int
) -> None:
    """While a sink is down, what others write counts as captured, once the journal counts in place of sinks."""
    pipeline = confirming(journal)
    pipeline.confirmed(TOO_MUCH)
    told: list[Position] = []
    capture = SimpleNamespace(passed=parse_position(position(9)), confirm=told.append)

    pipeline.confirmer.confirm(cast("Capture", capture), last=True)

    row = pipeline.store.pipelines.get(NAME)
    assert row is not None
    assert row.confirmed_position == position(expected)
    assert told == ([parse_position(position(9))] if expected == 9 else [])


def test_captured_confirms_at_once(confirming: Callable[[str], Confirming]) -> None:
    """As ever, and without being asked for durable disks."""
    assert confirming("confirm: captured").confirmed() == position(3)


def test_a_threshold_needs_auto(tmp_path: Path) -> None:
    """With another mode it is a problem of the file."""
    path = tmp_path / "orders.yaml"
    path.write_text(PIPELINE.format(journal="confirm: delivered, confirm_above: 1"))
    with pytest.raises(SpecError, match="confirm_above needs confirm: auto"):
        load_pipeline(path)
