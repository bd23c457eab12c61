"""Tables are made and upgraded by opening a store."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, Table, insert, inspect, select, text

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.state.database import migrate
from deltaforge_dagster.state.database.database import Database
from deltaforge_dagster.state.database.migrate import VERSION_TABLE
from deltaforge_dagster.state.database.tables import metadata
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.state.make import NAME, capture, held


def test_migrations_make_what_the_code_uses(store: StateStore) -> None:
    """The tables after all migrations are those of `tables`: no column, type or index differs."""
    with store.database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_type": True}
        )
        assert compare_metadata(context, metadata) == []


def test_up_to_date(tmp_path: Path) -> None:
    """Opening an up-to-date store again changes nothing in it."""
    url = f"sqlite:///{tmp_path}/state.db"
    for _ in range(2):
        store = StateStore.open(url)
        with store.database.read() as connection:
            version = connection.exec_driver_sql("PRAGMA schema_version").scalar()
        store.close()

    again = StateStore.open(url)
    with again.database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA schema_version").scalar() == version
    again.close()


def test_migrations_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sensor opens the store at each tick: the files of the migrations are not read each time."""
    url = f"sqlite:///{tmp_path}/state.db"
    StateStore.open(url).close()

    def read_again(_config: Config) -> ScriptDirectory:
        raise AssertionError

    monkeypatch.setattr(ScriptDirectory, "from_config", read_again)
    StateStore.open(url).close()


def migrations() -> ScriptDirectory:
    """Return all migrations."""
    return ScriptDirectory(str(Path(migrate.__file__).parent / "migrations"))


def upgrade_to(database: Database, version: str) -> None:
    """Upgrade the tables to a version."""
    script = migrations()
    with (
        database.write() as connection,
        EnvironmentContext(
            Config(), script, fn=lambda current, _: script._upgrade_revs(version, current)
        ) as environment,
    ):
        environment.configure(connection=connection, version_table=migrate.VERSION_TABLE)
        environment.run_migrations()


def row_of(table: Table, version: str) -> dict[str, object]:
    """Return a row that a release of that version could have left, all of its columns filled."""
    number = sum(version.encode())
    values: dict[type, object] = {
        int: number, str: f"text of {version}", float: number / 4, bool: True,
        bytes: version.encode(), object: {"of": [version]},
    }  # fmt: skip
    return {column.name: values[column.type.python_type] for column in table.columns}


def test_rows_of_every_version(store_url: str, tmp_path: Path) -> None:
    """Whatever release wrote a row, of whatever table: all those after it keep it as it is."""
    url = f"sqlite:///{tmp_path}/old.db" if store_url == "memory" else store_url
    database = Database(url)
    written: list[tuple[str, dict[str, object]]] = []
    versions = [one.revision for one in migrations().walk_revisions()][::-1]
    for version in versions:
        upgrade_to(database, version)
        with database.write() as connection:
            known = inspect(connection)
            for table in metadata.sorted_tables:
                if not known.has_table(table.name):
                    continue
                names = {one["name"] for one in known.get_columns(table.name)}
                row = {k: v for k, v in row_of(table, version).items() if k in names}
                connection.execute(insert(table.to_metadata(MetaData())).values(row))
                written.append((table.name, row))
    database.close()

    store = StateStore.open(url)
    with store.database.read() as connection:
        now = {
            table.name: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in metadata.sorted_tables
        }
    store.close()
    for name, row in written:
        assert [one for one in now[name] if row.items() <= one.items()], (name, row)
    assert {name for name, _ in written} == set(now)


def test_newer_than_the_code(store_url: str, tmp_path: Path) -> None:
    """Tables that a newer release has upgraded are left alone, with one clear error."""
    url = f"sqlite:///{tmp_path}/newer.db" if store_url == "memory" else store_url
    store = StateStore.open(url)
    with store.database.write() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9.0.0'"))
    store.close()

    with pytest.raises(SettingsError, match=r"version 9.0.0.*newer release"):
        StateStore.open(url)


def test_older_than_the_first_release(store_url: str, tmp_path: Path) -> None:
    """Tables of a development version are left alone, with what to do."""
    url = f"sqlite:///{tmp_path}/older.db" if store_url == "memory" else store_url
    store = StateStore.open(url)
    with store.database.write() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0027'"))
    store.close()

    with pytest.raises(SettingsError, match=r"development version 0027.*use a new store"):
        StateStore.open(url)


@pytest.mark.postgres
def test_beside_other_tables(postgres_server: PostgresServer) -> None:
    """Another program's Alembic version, as Dagster's, in the same database is not ours."""
    url = postgres_server.create_database()
    store = StateStore.open(url)
    with store.database.write() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num text)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('theirs')"))
    store.close()

    again = StateStore.open(url)
    capture(again, held(again), 1)
    again.close()


def open_and_use(url: str, number: int) -> None:
    """Open the store and write to it, in a process of its own."""
    store = StateStore.open(url)
    store.pipelines.register(f"{NAME}-{number}", "spec", ["redis"])
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_processes_that_start_at_once(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Several processes that find no tables make them once, and all go on."""
    url = f"sqlite:///{tmp_path}/new/state.db"
    if kind == "postgres":
        url = request.getfixturevalue("postgres_server").create_database()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=open_and_use, args=(url, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)

    assert [process.exitcode for process in processes] == [0] * 4
    store = StateStore.open(url)
    names = [row.name for row in store.pipelines.read()]
    store.close()
    assert names == [f"{NAME}-{n}" for n in range(4)]
