"""The table `deltaforge.commits`: which sink owns each of our tables, and which commits it has.

There is a row for each table, which every transaction that changes the table locks and updates. So
of two runs that write at once the second waits, and then sees what the first has committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.postgres.server import literal, quoted
from deltaforge_dagster.sinks.tables.writer import TableOwner

SCHEMA = "deltaforge"
NAME = (SCHEMA, "commits")
COMMITS = ".".join(NAME)
"""The table."""

NOTHING = -1
"""Number of the last commit of a table that has none."""

_DEFINITION = f"""CREATE TABLE {COMMITS} (
    schema_name text, table_name text, pipeline text, sink text, owner text, source text, \
relation bigint,
    base bigint NOT NULL DEFAULT 0, through bigint NOT NULL DEFAULT {NOTHING}, \
committed_at timestamp with time zone,
    columns jsonb, PRIMARY KEY (schema_name, table_name))"""
_COMMENTS = {
    "pipeline": (
        "the pipeline that writes the table; empty: the next one that wants to may have the table"
    ),
    "sink": "its sink",
    "owner": "the series of commits that is numbered",
    "source": "the table of the source",
    "relation": "oid of the table, which shows whether somebody has made it again",
    "base": "what is added to the number of a segment of the journal to make it df_position",
    "through": "the last segment of the last commit",
    "columns": "what identifies columns of the source, by name, however they are called there",
}
_SETUP_LOCK = 0x6465_6C74_6166_7267
"""Key of the advisory lock under which the table is created; its bytes spell `deltafrg`."""

_FIELDS = "pipeline, sink, owner, source, relation, base, through, columns"


@dataclass(frozen=True, slots=True)
class CommitsRow:
    """A row of `deltaforge.commits`: what is recorded about a table.

    Attributes:
        pipeline, sink: Who writes it; None if it is not known yet, and empty if anybody may.
        owner: The series of commits.
        source: Name of the source's table.
        relation: Oid of the table.
        base: Added to the number of a segment, it is the position of a row.
        through: The last segment of the last commit, `NOTHING` if there was none.
        columns: What identifies columns of the source, by name (`StagedTable.identities`), as far
            as that is known.
    """

    pipeline: str | None = None
    sink: str | None = None
    owner: str | None = None
    source: str | None = None
    relation: int | None = None
    base: int = 0
    through: int = NOTHING
    columns: Mapping[str, str] | None = None

    def is_of(self, owner: TableOwner) -> bool:
        """Return whether the table belongs to the sink, perhaps with another series of commits."""
        return (self.pipeline, self.sink) == (owner.pipeline, owner.sink_id)


def set_up(connection: psycopg.Connection) -> None:
    """Make the table unless it exists, with all its columns; two may do so at once."""
    if _is_complete(connection):
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_SETUP_LOCK])
        if not exists(connection):
            make_schema(connection, SCHEMA)
            connection.execute(_DEFINITION)
        elif not _is_complete(connection):
            connection.execute(f"ALTER TABLE {COMMITS} ADD COLUMN columns jsonb")
        for column, text in _COMMENTS.items():
            connection.execute(f"COMMENT ON COLUMN {COMMITS}.{column} IS {literal(text)}")


def _is_complete(connection: psycopg.Connection) -> bool:
    """Return whether the table exists with the column that those of earlier versions lack."""
    row = connection.execute(
        "SELECT EXISTS (SELECT FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE (n.nspname, c.relname, a.attname) = (%s, %s, 'columns') AND NOT a.attisdropped)",
        NAME,
    ).fetchone()
    return row is not None and bool(row[0])


def exists(connection: psycopg.Connection) -> bool:
    """Return whether the table exists."""
    return relation(connection, NAME) is not None


def relation(connection: psycopg.Connection, name: tuple[str, str]) -> tuple[int, str] | None:
    """Return oid and kind (`pg_class.relkind`) of the relation with a name, None if there is none.

    The role needs no privilege for the relation.
    """
    return connection.execute(
        "SELECT c.oid::bigint, c.relkind::text"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE (n.nspname, c.relname) = (%s, %s)",
        name,
    ).fetchone()


def make_schema(connection: psycopg.Connection, name: str) -> None:
    """Make a schema unless it exists.

    `IF NOT EXISTS` would need the right to make schemas even if it does.
    """
    row = connection.execute("SELECT to_regnamespace(%s) IS NULL", [quoted(name)]).fetchone()
    if row is not None and row[0]:
        connection.execute(f"CREATE SCHEMA {quoted(name)}")


def read(connection: psycopg.Connection, name: tuple[str, str]) -> CommitsRow:
    """Return what is recorded about a table."""
    return _select(connection, name, "") or CommitsRow()


def lock(connection: psycopg.Connection, name: tuple[str, str]) -> CommitsRow:
    """Lock a table's row until the end of the transaction, and return the row.

    Waits for other transactions that have locked it.
    """
    row = _select(connection, name, " FOR UPDATE")
    if row is None:
        connection.execute(
            f"INSERT INTO {COMMITS} (schema_name, table_name) VALUES (%s, %s)"
            " ON CONFLICT DO NOTHING",
            name,
        )
        row = _select(connection, name, " FOR UPDATE")
    if row is None:
        raise TableRejected(
            f"the row of {'.'.join(name)} in {COMMITS} was deleted at this moment; "
            "it is tried again"
        )
    return row


def write(connection: psycopg.Connection, name: tuple[str, str], row: CommitsRow) -> None:
    """Replace what is recorded about a table."""
    connection.execute(
        f"UPDATE {COMMITS} SET ({_FIELDS}, committed_at)"
        " = (%s, %s, %s, %s, %s, %s, %s, %s, clock_timestamp())"
        " WHERE (schema_name, table_name) = (%s, %s)",
        [
            row.pipeline,
            row.sink,
            row.owner,
            row.source,
            row.relation,
            row.base,
            row.through,
            None if row.columns is None else Jsonb(row.columns),
            *name,
        ],
    )


def claim(name: tuple[str, str]) -> str:
    """Return the statement that releases a table, with its rows, to the next sink that wants it."""
    schema, table = map(literal, name)
    return (
        f"INSERT INTO {COMMITS} (schema_name, table_name, pipeline) VALUES ({schema}, {table}, '')"
        " ON CONFLICT (schema_name, table_name) DO UPDATE SET pipeline = ''"
    )


def _select(
    connection: psycopg.Connection, name: tuple[str, str], suffix: str
) -> CommitsRow | None:
    with connection.cursor(row_factory=class_row(CommitsRow)) as cursor:
        return cursor.execute(
            f"SELECT {_FIELDS} FROM {COMMITS} WHERE (schema_name, table_name) = (%s, %s){suffix}",
            name,
        ).fetchone()
