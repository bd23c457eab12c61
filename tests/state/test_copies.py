"""Copies of a state store, and stores restored from them: SQLite and PostgreSQL, either way."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from deltaforge_dagster.errors import LeaseLost, NotAllowed, SettingsError
from deltaforge_dagster.state.copies import EPOCHS_AHEAD, back_up, restore
from deltaforge_dagster.state.database.primitives import Kv, Log
from deltaforge_dagster.state.database.tables import leases, log, metadata
from deltaforge_dagster.state.records import Processed
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.state.make import NAME, capture, deliver, held


def rows(store: StateStore) -> dict[str, list[dict[str, Any]]]:
    """Return everything that a store holds."""
    with store.database.read() as connection:
        return {
            table.name: [
                dict(row)
                for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()
            ]
            for table in metadata.sorted_tables
        }


def fill(store: StateStore) -> None:
    """Put something of everything into a store: JSON, nulls, bytes, numbers whose rows are gone."""
    lease = held(store, "cache", "search")
    capture(store, lease, 1, 2)
    capture(store, lease, 3, close=False)
    deliver(store, lease, "cache", 3)
    with store.fenced(lease) as writer:
        writer.segments.add_processed(
            [Processed(1, "chain", None, None, None, 0, 0, {"p": {"in": 3}})]
        )
    store.ranges.mark_published(NAME, 1, "changes")
    store.snapshots.request(NAME, tables=["public.orders"], condition=None, cause="command")
    Kv(store.database, "n").put("key", b"\x00\xff", ttl=60)
    for number in range(3):
        Log(store.database, "n").append("key", b"%d" % number)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[StateStore]:
    """An empty store to restore into."""
    opened = StateStore.open(f"sqlite:///{tmp_path}/other/state.db")
    yield opened
    opened.close()


def test_a_copy_is_the_store(store: StateStore, other: StateStore, tmp_path: Path) -> None:
    """From each kind of store, and back into it: the same rows, but leases, which are free."""
    file = tmp_path / "copy.db"
    fill(store)
    before = rows(store)

    assert back_up(store, file) == sum(map(len, before.values()))
    assert rows(store) == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.glob("*copy*")] == ["copy.db"]

    for target, force in ((other, False), (store, True)):
        if force:
            with target.database.write() as connection:
                connection.execute(leases.update().values(run_id=None))
        restore(file, target, force=force)
        after = rows(target)
        (lease,) = after.pop("lease")
        assert lease["epoch"] >= before["lease"][0]["epoch"] + EPOCHS_AHEAD
        assert (lease["run_id"], lease["session_id"], lease["expires_at"]) == (None, None, 0.0)
        assert after == {name: one for name, one in before.items() if name != "lease"}


@pytest.mark.postgres
def test_into_postgres(
    postgres_server: PostgresServer, sqlite_store: StateStore, tmp_path: Path
) -> None:
    """A store moves from SQLite to PostgreSQL; numbers go on behind the last ever given."""
    fill(sqlite_store)
    with sqlite_store.database.write() as connection:
        last = connection.execute(select(log.c.seq).order_by(log.c.seq.desc())).scalars().first()
        connection.execute(log.delete().where(log.c.seq == last))
    back_up(sqlite_store, tmp_path / "copy.db")
    target = StateStore.open(
        postgres_server.create_database().replace("postgres://", "postgresql://", 1)
    )
    try:
        restore(tmp_path / "copy.db", target, force=False)

        assert rows(target)["segment"] == rows(sqlite_store)["segment"]
        assert last is not None
        assert Log(target.database, "n").append("key", b"x") == last + 1
    finally:
        target.close()


def test_nobody_goes_on_from_before(sqlite_store: StateStore, tmp_path: Path) -> None:
    """A run that still lives somewhere can write nothing, also once as many runs have begun again."""
    file = tmp_path / "copy.db"
    fill(sqlite_store)
    back_up(sqlite_store, file)
    with sqlite_store.database.write() as connection:
        connection.execute(leases.update().values(expires_at=0.0))
    old = sqlite_store.leases.acquire(NAME, "old", 60)
    assert old is not None
    with pytest.raises(NotAllowed, match="run old works on pipeline 'orders'"):
        restore(file, sqlite_store, force=True)
    with sqlite_store.database.write() as connection:
        connection.execute(leases.update().values(expires_at=0.0))

    restore(file, sqlite_store, force=True)

    new = sqlite_store.leases.acquire(NAME, "new", 60)
    assert new is not None
    assert new.epoch > old.epoch + EPOCHS_AHEAD - 2
    with pytest.raises(LeaseLost), sqlite_store.fenced(old):
        pass


def test_a_store_that_holds_something_is_not_replaced(
    sqlite_store: StateStore, other: StateStore, tmp_path: Path
) -> None:
    """Refused, with its pipelines' names, and left as it is."""
    fill(sqlite_store)
    back_up(sqlite_store, tmp_path / "copy.db")
    held(other, "cache")
    before = rows(other)

    with pytest.raises(NotAllowed, match=r"not empty \(it has: orders\); --force"):
        restore(tmp_path / "copy.db", other, force=False)

    assert rows(other) == before
    with pytest.raises(NotAllowed, match="does not replace a file"):
        back_up(sqlite_store, tmp_path / "copy.db")
    with pytest.raises(NotAllowed, match="is not a directory"):
        back_up(sqlite_store, tmp_path / "nowhere" / "copy.db")


def test_what_is_no_copy(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Missing files, other files and damaged ones are refused before anything is touched."""
    file = tmp_path / "copy.db"
    with pytest.raises(NotAllowed, match="there is no file"):
        restore(file, sqlite_store, force=True)
    file.write_text("a text")
    with pytest.raises(SettingsError, match="is not a copy of a state store"):
        restore(file, sqlite_store, force=True)
    file.unlink()
    fill(sqlite_store)
    back_up(sqlite_store, file)
    with file.open("r+b") as damaged:
        damaged.seek(8192)
        damaged.write(b"\xff" * 8192)
    before = rows(sqlite_store)
    with pytest.raises(SettingsError, match=r"is damaged|is not a copy"):
        restore(file, sqlite_store, force=True)
    assert rows(sqlite_store) == before
