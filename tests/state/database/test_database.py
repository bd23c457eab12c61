"""Connections, durability settings, and foreign errors turned into ours without a secret."""

from __future__ import annotations

import pickle
import shutil
import sqlite3
import stat
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import column, insert, table, text

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    StoreLost,
    StoreUnavailable,
    Terminal,
)
from deltaforge_dagster.state.database import database
from deltaforge_dagster.state.database.database import Database, Turns
from deltaforge_dagster.state.store import StateStore
from tests.fix_postgres import StartPostgres
from tests.state.make import NAME, capture, held, position

SECRET = "s3cret/pass"


def on_its_connection(store: StateStore, *statements: str) -> None:
    """Run statements on the one connection that the pool holds."""
    with store.database.read() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_a_file_that_is_another_one(tmp_path: Path, what: str) -> None:
    """Neither reads nor writes go on with a file that has no name any more, nor with a new one of its name."""
    file = tmp_path / "folder" / "state.db"
    store = StateStore.open(f"sqlite:///{file}")
    lease = held(store)
    shutil.rmtree(file.parent)
    if what == "replaced":
        StateStore.open(f"sqlite:///{file}").close()

    message = f"state store {file}: the file was {what} while this process worked with it"
    with pytest.raises(StoreLost, match=message):
        store.pipelines.read()
    with pytest.raises(StoreLost, match=message), store.fenced(lease) as writer:
        writer.pipeline.set_confirmed(position(1))
    assert file.exists() == (what == "replaced")
    store.close()


class TestUrls:
    """What a state URL may be."""

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "nonsense",
            f"mysql://user:{SECRET}@host/db",
            "sqlite://",
            "sqlite:///:memory:",
            f"sqlite+aiosqlite:///{SECRET}",
            f"postgresql://user:{SECRET}@host:port/db",
        ],
    )
    def test_wrong(self, url: str) -> None:
        """A URL of another kind is refused without repeating it."""
        with pytest.raises(SettingsError, match="state URL") as caught:
            StateStore.open(url)

        assert SECRET not in str(caught.value)

    def test_memory_is_its_own(self) -> None:
        """Each opening of `memory` is a new, empty store."""
        one, two = StateStore.open("memory"), StateStore.open("memory")
        one.pipelines.register(NAME, "spec", [])

        assert two.pipelines.read() == []
        one.close()
        two.close()


class TestSqlite:
    """A file that is durable, private, and clear about what is wrong with it."""

    def test_settings(self, sqlite_store: StateStore) -> None:
        """Every connection writes ahead, syncs each commit, and waits for other writers."""
        with sqlite_store.database.read() as connection:
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "busy_timeout")
            }

        assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 10_000}

    def test_private_file_in_new_directories(self, tmp_path: Path) -> None:
        """Directories are made; the file and what SQLite puts beside it are the owner's only."""
        path = tmp_path / "a" / "b" / "state.db"
        store = StateStore.open(f"sqlite:///{path}")
        store.pipelines.register(NAME, "spec", [])

        modes = {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
        store.close()

        assert modes == {0o600}

    def test_survives_reopening(self, tmp_path: Path) -> None:
        """What was committed is there for the next process."""
        url = f"sqlite:///{tmp_path}/state.db"
        store = StateStore.open(url)
        capture(store, held(store), 1)
        before = store.pipelines.read(), store.ranges.read(NAME), store.segments.read(NAME)
        store.close()

        again = StateStore.open(url)
        after = again.pipelines.read(), again.ranges.read(NAME), again.segments.read(NAME)
        again.close()

        assert after == before

    def test_disk_full(self, sqlite_store: StateStore, tmp_path: Path) -> None:
        """A full disk is an error that may pass, names the file, and leaves nothing half."""
        on_its_connection(sqlite_store, "PRAGMA max_page_count = 1")
        sqlite_store.pipelines.register(NAME, "spec", [])
        with pytest.raises(StoreUnavailable, match="full") as caught:
            sqlite_store.pipelines.register(NAME, "x" * 100_000, ["redis"])

        assert f"{tmp_path}/state.db" in str(caught.value)
        on_its_connection(sqlite_store, "PRAGMA max_page_count = 100000")
        assert sqlite_store.checkpoints.read(NAME) == {}
        sqlite_store.pipelines.register(NAME, "x" * 100_000, ["redis"])

    def test_read_only(self, sqlite_store: StateStore, tmp_path: Path) -> None:
        """A database that cannot be written says so with its path, and can be read."""
        on_its_connection(sqlite_store, "PRAGMA query_only = 1")
        with pytest.raises(StoreUnavailable, match="readonly") as caught:
            sqlite_store.pipelines.register(NAME, "spec", [])

        assert f"{tmp_path}/state.db" in str(caught.value)
        assert sqlite_store.pipelines.read() == []

    def test_locked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another program that keeps the write lock makes a clear error, and only while it does."""
        monkeypatch.setattr(database, "_BUSY_SECONDS", 0.1)
        store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
        other = sqlite3.connect(tmp_path / "state.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"state\.db: .*locked: another process"):
            store.pipelines.register(NAME, "spec", [])
        assert store.pipelines.read() == []  # readers are not in the way
        other.execute("ROLLBACK")
        other.close()

        store.pipelines.register(NAME, "spec", [])
        store.close()

    def test_not_reachable(self, tmp_path: Path) -> None:
        """A path that cannot hold a database is named."""
        (tmp_path / "file").write_text("")
        for path in (tmp_path / "file" / "state.db", tmp_path):
            with pytest.raises(StoreUnavailable, match=str(path)):
                StateStore.open(f"sqlite:///{path}")

    def test_another_kind_of_file(self, tmp_path: Path) -> None:
        """A file that is no database is refused, not overwritten."""
        path = tmp_path / "notes.txt"
        path.write_text("dear diary " * 1000)
        with pytest.raises(SettingsError, match="another kind of file"):
            StateStore.open(f"sqlite:///{path}")

        assert path.read_text().startswith("dear diary")

    def test_foreign_tables(self, sqlite_store: StateStore) -> None:
        """Missing tables are no reason to try again."""
        with sqlite_store.database.write() as connection:
            connection.execute(text("DROP TABLE segment"))
        with pytest.raises(Terminal, match="not as this release made them"):
            sqlite_store.segments.read(NAME)


@pytest.mark.postgres
class TestPostgres:
    """A server that may be away, restart, or refuse us."""

    def test_unreachable(self) -> None:
        """No server at the address is an error that may pass, without the password."""
        url = "postgresql://someone:s3cret@127.0.0.1:1/state"
        with pytest.raises(StoreUnavailable, match=r"someone:\*\*\*@127\.0\.0\.1:1") as caught:
            StateStore.open(url)

        assert "s3cret" not in "".join(traceback.format_exception(caught.value))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_refused(self, postgres_dsn: str) -> None:
        """Wrong password and missing database each have an error of their own, without a secret."""
        address = postgres_dsn.rpartition("@")[2]
        wrong: list[tuple[type[DeltaforgeError], str]] = [
            (AuthFailed, f"postgresql://postgres:s3cret@{address}"),
            (SettingsError, postgres_dsn.rpartition("/")[0] + "/nowhere"),
        ]
        for kind, url in wrong:
            with pytest.raises(kind, match="DELTAFORGE_STATE_URL") as caught:
                StateStore.open(url)
            printed = "".join(traceback.format_exception(caught.value))
            assert "s3cret" not in printed
            assert postgres_dsn.partition("postgres:")[2].partition("@")[0] not in printed

    def test_missing_grant(self, postgres_dsn: str) -> None:
        """A role that may not create tables is told which grant is missing."""
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS reader")
            connection.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
            connection.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        address = postgres_dsn.rpartition("@")[2]

        with pytest.raises(PermissionMissing, match="CREATE"):
            StateStore.open(f"postgresql://reader:reader@{address}")

    def test_settings(self, postgres_dsn: str) -> None:
        """A transaction left idle is ended, no lock is waited for for ever, a commit is on disk."""
        store = StateStore.open(postgres_dsn)
        with store.database.read() as connection:
            values = {
                name: connection.exec_driver_sql(f"SHOW {name}").scalar()
                for name in (
                    "idle_in_transaction_session_timeout",
                    "lock_timeout",
                    "synchronous_commit",
                )
            }
        store.close()

        assert values == {
            "idle_in_transaction_session_timeout": "15s",
            "lock_timeout": "10s",
            "synchronous_commit": "on",
        }

    def test_rows_are_not_sent_as_a_pipeline(
        self, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Amid one, the server would wait for a frozen process without a limit."""
        database = Database(postgres_dsn)
        monkeypatch.delattr(psycopg.Cursor, "executemany")
        rows = [{"number": number, "text": str(number)} for number in range(1500)]
        with database.write() as connection:
            connection.execute(text("CREATE TABLE t (number int PRIMARY KEY, text text)"))
            connection.execute(insert(table("t", column("number"), column("text"))), rows)
            connection.execute(
                text("UPDATE t SET text = 'x' || :text WHERE number = :number"), rows
            )
        with database.read() as connection:
            query = text("SELECT count(*), min(text), max(text) FROM t WHERE text LIKE 'x%'")
            assert connection.execute(query).one() == (1500, "x0", "x999")
        database.close()

    def test_cut_connection(self, postgres_dsn: str) -> None:
        """Connections cut while idle are replaced unseen; within a block nothing is written."""
        store = StateStore.open(postgres_dsn)
        lease = held(store)
        cut = text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        other = StateStore.open(postgres_dsn)

        with other.database.read() as connection:
            connection.execute(cut)
        with store.fenced(lease) as writer:
            writer.pipeline.set_confirmed(position(1))

        with pytest.raises(StoreUnavailable), store.fenced(lease) as writer:  # noqa: PT012
            writer.pipeline.set_confirmed(position(2))
            with other.database.read() as connection:
                connection.execute(cut)
            writer.lease.set_session("lost")
        pipeline, row = store.pipelines.get(NAME), store.leases.get(NAME)
        other.close()
        store.close()

        assert pipeline is not None
        assert pipeline.confirmed_position == position(1)
        assert row is not None
        assert row.session_id is None

    def test_restarted_server(self, start_postgres: StartPostgres) -> None:
        """While the server is away every call says so; when it is back the next one works."""
        server = start_postgres()
        store = StateStore.open(server.dsn)
        lease = held(store, seconds=600)
        server.stop()
        calls: list[Callable[[], object]] = [
            store.now,
            store.pipelines.read,
            lambda: store.leases.acquire(NAME, "run-2", 1),
            lambda: store.fenced(lease).__enter__(),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                call()
        server.restart()

        with store.fenced(lease) as writer:
            writer.pipeline.set_confirmed(position(3))
        store.close()


class TestTurns:
    """Threads get their turn in the order in which they asked."""

    def test_first_come_first_served(self) -> None:
        """Whoever asked first comes first, however busy the others are."""
        turns = Turns("memory", 10)
        order: list[int] = []

        def work(number: int) -> None:
            with turns.turn():
                order.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
        with turns.turn():
            for number, thread in enumerate(threads):
                thread.start()
                while len(turns._waiting) <= number:
                    time.sleep(0.001)
        for thread in threads:
            thread.join()

        assert order == [0, 1, 2, 3, 4]

    def test_waiting_ends(self) -> None:
        """Who waits too long leaves the line, and the lock still works afterwards."""
        turns = Turns("memory", 0.1)
        with turns.turn(), pytest.raises(StoreUnavailable, match="memory"), turns.turn():
            pytest.fail("two at once")

        with turns.turn():
            pass

    def test_error_passes_the_turn_on(self) -> None:
        """A turn that ends with an error is over."""
        turns = Turns("memory", 0.1)
        with pytest.raises(ZeroDivisionError), turns.turn():
            _ = 1 // 0
        with turns.turn():
            pass
