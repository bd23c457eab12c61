"""Copies of a state store in one file, and stores that are made of them again.

A copy is a SQLite file with the tables of its release, whatever the store is kept in, so that it can be
restored into SQLite and PostgreSQL alike, by its own release or a later one. It is read in one transaction
and shows one moment, while runs go on. What it cannot hold is the journal.

A restored store knows nothing of what came after the copy, so nobody of that time may go on with it: its
leases are free, and their epochs are so far ahead that a run which still lives somewhere can write
nothing, and that no file's name is used again. Capture goes on at the copy's position or stops, when the
source has forgotten it; sinks go on as `pipeline.resume` says.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    insert,
    select,
    text,
    update,
)

from deltaforge_dagster.errors import NotAllowed, SettingsError
from deltaforge_dagster.folders import sync_folder
from deltaforge_dagster.state.database import Database, clock
from deltaforge_dagster.state.migrate import VERSION_TABLE, migrate
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.tables import checkpoints, leases, metadata, pipelines

EPOCHS_AHEAD = 1_000_000
"""How far the epochs of a restored store are ahead: more than runs can have begun since the copy."""

_ROWS_AT_ONCE = 5000


def back_up(store: StateStore, file: Path) -> int:
    """Write a copy of a store; return how many rows it has.

    The file is there, durable and readable by its owner only, or not at all.

    Raises:
        NotAllowed: There is such a file already.
        StoreUnavailable: The store cannot be read, or the copy not be written.
    """
    if file.exists():
        raise NotAllowed(f"{file} is there already; a copy replaces nothing")
    if not file.absolute().parent.is_dir():
        raise NotAllowed(f"{file.absolute().parent} is no directory")
    draft = file.absolute().with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        rows = _write(store, draft)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.rename(file)
        sync_folder(draft.parent)
    finally:
        for left in draft.parent.glob(f"{draft.name}*"):
            left.unlink()
    return rows


def restore(file: Path, store: StateStore, *, force: bool) -> dict[str, int]:
    """Make a store what a copy says; return how many rows each table got.

    Everything happens in one transaction, or nothing.

    Args:
        file: The copy; it is only read.
        store: The store, empty unless `force` is given.
        force: Replace what the store holds.

    Raises:
        NotAllowed: There is no such file, the store is not empty, or a run works on a pipeline of it.
        SettingsError: The file is no copy of a state store, or of a newer release.
    """
    _check(file)
    with tempfile.TemporaryDirectory(prefix="deltaforge-restore-") as folder:
        opened = Path(folder) / "copy.db"
        shutil.copyfile(file, opened)
        copy = Database(f"sqlite:///{opened}")
        copy.where = str(file)
        try:
            migrate(copy)
            with copy.read() as source, store.database.write() as target:
                epochs = _empty(target, store.database.where, force=force)
                rows = {
                    table.name: _copy(table, source, target) for table in metadata.sorted_tables
                }
                _make_safe(target, epochs)
        finally:
            copy.close()
    return rows


def _write(store: StateStore, draft: Path) -> int:
    copy = Database(f"sqlite:///{draft}")
    try:
        migrate(copy)
        with store.database.read() as source, copy.write() as target:
            if source.dialect.name == "postgresql":
                source.execution_options(isolation_level="REPEATABLE READ")
            rows = sum(_copy(table, source, target) for table in metadata.sorted_tables)
    finally:
        copy.close()
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # one file, which nothing writes beside
    return rows


def _check(file: Path) -> None:
    """Prove that a file is a copy, or a store itself, before anything is done with it."""
    if not file.is_file():
        raise NotAllowed(f"there is no file {file}")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as copy:
            found = {name for (name,) in copy.execute("SELECT name FROM sqlite_master")}
            damage = copy.execute("PRAGMA quick_check").fetchone()
    except sqlite3.DatabaseError as error:
        raise SettingsError(f"{file} is no copy of a state store: {error}") from error
    if not {pipelines.name, leases.name, VERSION_TABLE} <= found:
        raise SettingsError(f"{file} is no copy of a state store: it has other tables")
    if damage != ("ok",):
        raise SettingsError(f"{file} is damaged: {damage[0]}")


def _empty(target: Connection, where: str, *, force: bool) -> Mapping[str, int]:
    """Take everything out of a store; return the epochs that its pipelines had reached."""
    held = target.execute(select(leases).with_for_update()).mappings().all()
    filled = [table for table in metadata.sorted_tables if _any(target, table)]
    if filled and not force:
        names = ", ".join(str(row["pipeline"]) for row in held) or "no pipelines, but other rows"
        raise NotAllowed(f"{where} is not empty (it has: {names}); --force replaces all of it")
    now = target.execute(select(clock())).scalar_one()
    for row in held:
        if row["run_id"] is not None and row["expires_at"] > now:
            raise NotAllowed(
                f"run {row['run_id']} works on pipeline {row['pipeline']!r}; stop it, then restore"
            )
    for table in filled:
        target.execute(delete(table))
    return {row["pipeline"]: row["epoch"] for row in held}


def _any(connection: Connection, table: Table) -> bool:
    return connection.execute(select(text("1")).select_from(table).limit(1)).first() is not None


def _copy(table: Table, source: Connection, target: Connection) -> int:
    """Copy a table's rows, and the last number that it has given; return how many there are."""
    rows = source.execute(
        select(*(_read(column).label(_bound(column)) for column in table.columns))
        .order_by(*table.primary_key)
        .execution_options(yield_per=_ROWS_AT_ONCE)
    )
    dialect = target.dialect.name
    statement = insert(table).values({one.name: _written(one, dialect) for one in table.columns})
    count = 0
    for some in rows.partitions():
        target.execute(statement, [row._asdict() for row in some])
        count += len(some)
    serial = table.autoincrement_column
    if serial is not None:
        last = max(_last_number(source, serial), _last_number(target, serial))
        _set_last_number(target, serial, last)
    return count


def _read(column: Column[Any]) -> ColumnElement[Any]:
    """Return what to read of a column: JSON as the text it is, so that nothing parses it."""
    return cast(column, Text) if isinstance(column.type, JSON) else column


def _written(column: Column[Any], dialect: str) -> ColumnElement[Any]:
    """Return what is written into a column; JSON is bound as text."""
    if not isinstance(column.type, JSON):
        return bindparam(_bound(column), type_=column.type)
    text_of = bindparam(_bound(column), type_=Text())
    return cast(text_of, JSON) if dialect == "postgresql" else text_of


def _bound(column: Column[Any]) -> str:
    return f"copied_{column.name}"


def _last_number(connection: Connection, serial: Column[Any]) -> int:
    """Return the last number that a column has given, whether its row is still there or not."""
    if connection.dialect.name == "postgresql":
        query = text(
            "SELECT pg_sequence_last_value(CAST(pg_get_serial_sequence(:table, :column) AS regclass))"
        )
        names = {"table": serial.table.name, "column": serial.name}
        return connection.execute(query, names).scalar_one() or 0
    found = connection.execute(
        text("SELECT seq FROM sqlite_sequence WHERE name = :table"), {"table": serial.table.name}
    ).scalar()
    return found or 0


def _set_last_number(connection: Connection, serial: Column[Any], last: int) -> None:
    names: dict[str, Any] = {"table": serial.table.name, "last": last}
    if not last:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(
            text("SELECT setval(CAST(pg_get_serial_sequence(:table, :column) AS regclass), :last)"),
            {**names, "column": serial.name},
        )
        return
    connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :table"), names)
    connection.execute(
        text("INSERT INTO sqlite_sequence (name, seq) VALUES (:table, :last)"), names
    )


def _make_safe(target: Connection, epochs: Mapping[str, int]) -> None:
    """Free the leases, far ahead of every epoch that was; let everything be tried at once."""
    for name, epoch in epochs.items():
        target.execute(
            update(leases)
            .where(leases.c.pipeline == name, leases.c.epoch < epoch)
            .values(epoch=epoch)
        )
    target.execute(
        update(leases).values(
            epoch=leases.c.epoch + EPOCHS_AHEAD, run_id=None, session_id=None, expires_at=0.0
        )
    )
    target.execute(update(pipelines).values(probe_after=0.0, probe_wait=0.0))
    target.execute(update(checkpoints).values(next_attempt_at=0.0))
