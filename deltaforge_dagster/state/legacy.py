"""Imports checkpoints from the storage of DeltaForge, the predecessor.

DeltaForge keeps positions in the namespace `checkpoints` of its storage: `{source id}::sink::{sink
id}` is the position that a sink has acknowledged. `{source id}` alone is that of the whole
pipeline, from a time when sinks had no keys of their own. Values are positions as JSON text
(`positions`). The storage is

- a SQLite file or a PostgreSQL database with the table `df_kv (ns, key, val, updated_at,
  expires_at)`, or, in older versions, `kv (namespace, key, value)`;
- in even older versions a JSON file with one object that maps keys to positions.

The checkpoints are copied into this state store under the same namespace and keys (`Kv`). The first
start of a pipeline uses them and deletes them.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, or_

from deltaforge_dagster.config.secrets import check_encoded, mask
from deltaforge_dagster.errors import SettingsError, SpecError, StoreUnavailable
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.database.tables import kv

_QUERIES = (
    "SELECT key, val FROM df_kv WHERE ns = 'checkpoints'",
    "SELECT key, value FROM kv WHERE namespace = 'checkpoints'",
)


NAMESPACE = "checkpoints"

_SINK = "::sink::"


def sink_key(source_id: str, sink_id: str) -> str:
    """Return the key of one sink's checkpoint; the key of the whole pipeline is the source's id."""
    return f"{source_id}{_SINK}{sink_id}"


def of_source(checkpoints: dict[str, bytes], source_id: str) -> dict[str, bytes]:
    """Return the checkpoints of one source, including those of sinks that no longer exist."""
    return {
        key: value
        for key, value in checkpoints.items()
        if key == source_id or key.startswith(f"{source_id}{_SINK}")
    }


def stored(checkpoints: Kv, source_id: str) -> dict[str, bytes]:
    """Return the imported checkpoints of one source in this state store."""
    return of_source(checkpoints.items(source_id), source_id)


def forget(connection: Connection, source_id: str) -> None:
    """Delete the imported checkpoints of one source from this state store."""
    prefix = f"{source_id}{_SINK}"
    connection.execute(
        delete(kv).where(
            kv.c.ns == NAMESPACE,
            or_(kv.c.key == source_id, kv.c.key.startswith(prefix, autoescape=True)),
        )
    )


def read_storage(storage: str) -> dict[str, bytes]:
    """Return all checkpoints in a storage of DeltaForge, without changing it.

    Args:
        storage: Path of the SQLite or JSON file, or `postgresql://user:password@host/db`.

    Raises:
        SettingsError: There is no such file, it is not a storage of DeltaForge, or the address is
            invalid.
        StoreUnavailable: The storage cannot be read now.
    """
    if storage.startswith(("postgres://", "postgresql://")):
        return _postgres(storage)
    path = Path(storage.removeprefix("sqlite:///"))
    try:
        with path.open("rb") as file:
            is_sqlite = file.read(15) == b"SQLite format 3"  # without the zero byte that ends it
    except FileNotFoundError as error:
        raise SettingsError(f"{path}: does not exist (name DeltaForge's --storage-path)") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot be read: {error.strerror}") from error
    return _sqlite(path) if is_sqlite else _json(path)


def _sqlite(path: Path) -> dict[str, bytes]:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
            names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
            for table, query in zip(("df_kv", "kv"), _QUERIES, strict=True):
                if table in names:
                    return _pairs(connection.execute(query))
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{path}: {error}") from error
    raise SettingsError(f"{path}: has neither a table df_kv nor kv: it is no storage of DeltaForge")


def _postgres(url: str) -> dict[str, bytes]:
    try:
        check_encoded(url)
    except SpecError as error:
        raise SettingsError(f"the address of DeltaForge's storage {error}") from None
    import psycopg  # noqa: PLC0415 - only this reads a PostgreSQL database without SQLAlchemy

    where = mask(url)
    try:
        with psycopg.connect(url, connect_timeout=5) as connection:
            row = connection.execute("SELECT to_regclass('df_kv'), to_regclass('kv')").fetchone()
            assert row is not None
            for table, query in zip(row, _QUERIES, strict=True):
                if table is not None:
                    return _pairs(connection.execute(query))
    except psycopg.Error as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StoreUnavailable(f"{where}: {mask(reason)}") from error
    raise SettingsError(
        f"{where}: has neither a table df_kv nor kv: it is no storage of DeltaForge"
    )


def _json(path: Path) -> dict[str, bytes]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: is neither a SQLite file nor a JSON object of checkpoints")
    return {
        key: _bytes(value if isinstance(value, str) else json.dumps(value))
        for key, value in content.items()
    }


def _pairs(rows: Iterator[Any]) -> dict[str, bytes]:
    return {str(key): _bytes(value) for key, value in rows}


def _bytes(value: object) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[call-overload]
