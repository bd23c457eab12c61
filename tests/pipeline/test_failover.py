"""Another server in the source's place: what is compared, recorded and refused."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator

import pytest

from deltaforge_dagster.errors import PositionLost, SourceMisconfigured
from deltaforge_dagster.pipeline.failover import Failover, differences
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.database.primitives import Kv, Log
from deltaforge_dagster.state.store import FencedWriter, StateStore
from deltaforge_dagster.tables import Column, TableSchema
from tests.pipeline.changes import PlayedSource

START = LsnPosition(100)


def table(name: str, *columns: str, key: tuple[str, ...] = ("id",)) -> TableSchema:
    """Return a table whose columns are written `name type`."""
    parts = [column.split(" ") for column in columns]
    made = (Column(one, kind, None, True, n) for n, (one, kind) in enumerate(parts, start=1))
    return TableSchema("shop", "public", name, tuple(made), key)


class Replaced(PlayedSource):
    """A source behind which servers change."""

    def __init__(self, identity: str, *tables: TableSchema) -> None:
        super().__init__([])
        self.server = identity
        self.catalog = {one.full_name: one for one in tables}
        self.captured = set(self.catalog)
        self.moved: Position | None = START
        self.asked: list[str] = []

    def identity(self) -> str:
        """Return what the test says."""
        return self.server

    def relocate(self, position: Position, previous: str) -> Position:
        """Go on where the test says."""
        self.asked.append(previous)
        if self.moved is None:
            raise PositionLost("gone")
        return self.moved

    def tables(self) -> list[str]:
        """Return the tables that the patterns match."""
        return sorted(self.captured)

    def schema(self, table: str) -> TableSchema:
        """Return a table of the catalog."""
        if table not in self.catalog:
            raise SourceMisconfigured(table)
        return self.catalog[table]


@pytest.fixture
def store() -> Iterator[StateStore]:
    """A store in memory."""
    opened = StateStore.open("memory")
    yield opened
    opened.close()


def register(table: TableSchema, writer: FencedWriter) -> None:
    """Register a version of a table."""
    writer.schemas.register("t", table, START.to_json())


@pytest.fixture
def lease(store: StateStore) -> Iterator[ActiveLease]:
    """The lease of the pipeline `p`, which has captured two tables."""
    store.pipelines.register("p", "hash", ["s"])
    store.pipelines.set_start("p", START.to_json())
    held = ActiveLease.acquire(
        store, "p", "run", seconds=30, renew_seconds=5, on_renewal=lambda: None
    )
    assert held is not None
    for one in (
        table("orders", "id int"),
        table("orders", "id int", "v text"),
        table("items", "id int"),
    ):
        held.write(functools.partial(register, one))
    yield held
    held.release()


def failover(store: StateStore, lease: ActiveLease, drift: str = "adapt") -> Failover:
    """Return what asks for the server of source `db`."""
    return Failover(store, lease, "db", drift)  # type: ignore[arg-type]


ORDERS, ITEMS = table("orders", "id int", "v text"), table("items", "id int")


def test_the_same_server_is_remembered_and_asked_nothing(
    store: StateStore, lease: ActiveLease
) -> None:
    """The first one seen is stored; the same again changes nothing."""
    for _ in range(2):
        source = Replaced("a")
        assert failover(store, lease).start(source, START) == START
        assert source.asked == []

    assert Kv(store.database, "failover/p").items() == {"identity:db": b"a"}


def test_another_server_is_recorded(store: StateStore, lease: ActiveLease) -> None:
    """The record holds both identities and every table; then it is the same server again."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", ORDERS, ITEMS)

    assert failover(store, lease).start(source, START) == START
    assert failover(store, lease).start(source, START) == START

    assert source.asked == ["a"]
    kept = Kv(store.database, "failover/p").items()
    (entry,) = Log(store.database, "failover/p").entries("db/history")
    assert kept["identity:db"] == b"b"
    assert kept["db/reconciliation"] == entry.value
    record = json.loads(entry.value)
    assert list(record) == [
        "id", "source_id", "previous_identity", "new_identity", "table_results", "reconciled_at"
    ]  # fmt: skip
    assert (record["previous_identity"], record["new_identity"]) == ("a", "b")
    assert record["table_results"] == [
        {"db": "shop", "table": "public.orders", "deltas": []},
        {"db": "shop", "table": "public.items", "deltas": []},
    ]


def test_a_position_that_moved_is_the_captured_one(store: StateStore, lease: ActiveLease) -> None:
    """Where the source goes on further, the next run reads on from there, too."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", ORDERS, ITEMS)
    source.moved = LsnPosition(500)

    assert failover(store, lease).start(source, START) == LsnPosition(500)

    row = store.pipelines.get("p")
    assert row is not None
    assert row.captured_position == LsnPosition(500).to_json()


def test_a_lost_position_changes_nothing(store: StateStore, lease: ActiveLease) -> None:
    """The old server stays the known one, so that every later run stops as well."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", ORDERS, ITEMS)
    source.moved = None

    for _ in range(2):
        with pytest.raises(PositionLost):
            failover(store, lease).start(source, START)
    assert Kv(store.database, "failover/p").items() == {"identity:db": b"a"}


def test_drift_is_logged_or_stops(
    store: StateStore, lease: ActiveLease, caplog: pytest.LogCaptureFixture
) -> None:
    """`halt` stops for any difference and `adapt` for none but keys."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", table("orders", "id bigint", "w text"))

    with pytest.raises(SourceMisconfigured, match="on_schema_drift to adapt"):
        failover(store, lease, "halt").start(source, START)
    with caplog.at_level(logging.WARNING):
        failover(store, lease).start(source, START)

    assert (
        "public.items: table_dropped; public.orders: column_added w, column_dropped v, "
        "column_type_changed id"
    ) in caplog.text


def test_an_earlier_form_and_tables_no_longer_captured_are_no_drift(
    store: StateStore, lease: ActiveLease
) -> None:
    """A table may look as it did before its newest version; one that is left out counts no more."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", table("orders", "id int"), table("items", "other text", key=()))
    source.captured = {"public.orders"}

    failover(store, lease, "halt").start(source, START)


def test_another_key_always_stops(store: StateStore, lease: ActiveLease) -> None:
    """Consumers would take its rows for others."""
    failover(store, lease).start(Replaced("a"), START)
    source = Replaced("b", table("orders", "id int", "v text", key=("v",)), ITEMS)

    with pytest.raises(SourceMisconfigured, match=r"primary_key_changed \(v\)"):
        failover(store, lease).start(source, START)


def test_types_that_a_source_does_not_know_are_not_compared() -> None:
    """An empty type is no difference."""
    assert differences(ORDERS, table("orders", "id ", "v ")) == []
