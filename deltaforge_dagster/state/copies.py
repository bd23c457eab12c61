"""Backs up a state store to a file, and restores it.

A copy is a SQLite file with the tables of its release, whichever database the store uses, so it can
be restored into SQLite or PostgreSQL by the same or a later release. It is read in one transaction
and is thus consistent, while runs continue. It does not contain the journal.

A restored store knows nothing of what happened after the copy was made, so no run of that time may
continue with it: its leases are free, and their epochs are so far ahead that a run that is still
active somewhere cannot write, and that no file name is reused. Tables of a lake may have changes of
that time, so none of their commits count as written. Capture resumes at the copy's position, or
stops if the source has discarded that part of its log; `pipeline.deliver.resumption` describes how
sinks resume.
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
from deltaforge_dagster.state.database.database import Database, clock
from deltaforge_dagster.state.database.migrate import VERSION_TABLE, migrate
from deltaforge_dagster.state.database.tables import (
    checkpoints,
    leases,
    metadata,
    pipelines,
    table_commits,
    table_writes,
)
from deltaforge_dagster.state.store import StateStore

EPOCHS_AHEAD = 1_000_000
"""Added to the epochs of a restored store: more runs than can have begun since the copy."""

_ROWS_AT_ONCE = 5000


def back_up(store: StateStore, file: Path) -> int:
    """Write a copy of a store and return its number of rows.

    Either the complete file exists afterwards, durable and readable by its owner only, or none.

    Raises:
        NotAllowed: The file already exists, or its directory does not.
        StoreUnavailable: The store cannot be read, or the copy cannot be written.
    """
    if file.exists():
        raise NotAllowed(f"{file} already exists; a copy does not replace a file")
    if not file.absolute().parent.is_dir():
        raise NotAllowed(f"{file.absolute().parent} is not a directory")
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
    """Restore a store from a copy, in one transaction, and return the number of rows of each table.

    Args:
        file: The copy; it is not modified.
        store: The store, empty unless `force` is given.
        force: Replace the store's content.

    Raises:
        NotAllowed: There is no such file, the store is not empty, or a run holds the lease of one
            of its pipelines.
        SettingsError: The file is not a copy of a state store, is damaged, or was made by a newer
            release.
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
            # One snapshot for all tables; a transaction of SQLite has one anyway.
            if source.dialect.name == "postgresql":
                source.execution_options(isolation_level="REPEATABLE READ")
            rows = sum(_copy(table, source, target) for table in metadata.sorted_tables)
    finally:
        copy.close()
    with closing(sqlite3.connect(draft)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # a single file, without a -wal file
    return rows


def _check(file: Path) -> None:
    """Check that a file is an undamaged copy, or the file of a store."""
    if not file.is_file():
        raise NotAllowed(f"there is no file {file}")
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as copy:
            tables = {name for (name,) in copy.execute("SELECT name FROM sqlite_master")}
            damage = copy.execute("PRAGMA quick_check").fetchone()
    except sqlite3.DatabaseError as error:
        raise SettingsError(f"{file} is not a copy of a state store: {error}") from error
    if not {pipelines.name, leases.name, VERSION_TABLE} <= tables:
        raise SettingsError(f"{file} is not a copy of a state store: it has other tables")
    if damage != ("ok",):
        raise SettingsError(f"{file} is damaged: {damage[0]}")


def _empty(target: Connection, where: str, *, force: bool) -> Mapping[str, int]:
    """Delete all rows of a store; return the epochs that its pipelines had reached."""
    locked = target.execute(select(leases).with_for_update()).mappings().all()
    filled = [table for table in metadata.sorted_tables if _has_rows(target, table)]
    if filled and not force:
        names = ", ".join(str(row["pipeline"]) for row in locked) or "no pipelines, but other rows"
        raise NotAllowed(f"{where} is not empty (it has: {names}); --force replaces its content")
    now = target.execute(select(clock())).scalar_one()
    for row in locked:
        if row["run_id"] is not None and row["expires_at"] > now:
            raise NotAllowed(
                f"run {row['run_id']} works on pipeline {row['pipeline']!r}; stop it, then restore"
            )
    for table in filled:
        target.execute(delete(table))
    return {row["pipeline"]: row["epoch"] for row in locked}


def _has_rows(connection: Connection, table: Table) -> bool:
    return connection.execute(select(text("1")).select_from(table).limit(1)).first() is not None


def _copy(table: Table, source: Connection, target: Connection) -> int:
    """Copy a table's rows and the last value of its serial column; return the number of rows."""
    rows = source.execute(
        select(*(_read(column).label(_bound(column)) for column in table.columns))
        .order_by(*table.primary_key)
        .execution_options(yield_per=_ROWS_AT_ONCE)
    )
    dialect = target.dialect.name
    statement = insert(table).values(
        {column.name: _written(column, dialect) for column in table.columns}
    )
    count = 0
    for batch in rows.partitions():
        target.execute(statement, [row._asdict() for row in batch])
        count += len(batch)
    serial = table.autoincrement_column
    if serial is not None:
        last = max(_last_number(source, serial), _last_number(target, serial))
        _set_last_number(target, serial, last)
    return count


def _read(column: Column[Any]) -> ColumnElement[Any]:
    """Return the expression that reads a column: JSON is read as text, so that it is not parsed."""
    return cast(column, Text) if isinstance(column.type, JSON) else column


def _written(column: Column[Any], dialect: str) -> ColumnElement[Any]:
    """Return the expression that writes a column: JSON is bound as text."""
    if not isinstance(column.type, JSON):
        return bindparam(_bound(column), type_=column.type)
    text_of = bindparam(_bound(column), type_=Text())
    return cast(text_of, JSON) if dialect == "postgresql" else text_of


def _bound(column: Column[Any]) -> str:
    return f"copied_{column.name}"


def _last_number(connection: Connection, serial: Column[Any]) -> int:
    """Return the last value that a serial column has assigned, even if its row was deleted."""
    if connection.dialect.name == "postgresql":
        query = text(
            "SELECT pg_sequence_last_value("
            "CAST(pg_get_serial_sequence(:table, :column) AS regclass))"
        )
        names = {"table": serial.table.name, "column": serial.name}
        return connection.execute(query, names).scalar_one() or 0
    number = connection.execute(
        text("SELECT seq FROM sqlite_sequence WHERE name = :table"), {"table": serial.table.name}
    ).scalar()
    return number or 0


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
    """Free the leases, with epochs beyond all that were used, and end all back-offs."""
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
    target.execute(delete(table_commits))
    # Most of the writes that the copy has as unpublished were published since. Dagster would take a
    # second event for a newer one.
    target.execute(update(table_writes).values(published=True))
