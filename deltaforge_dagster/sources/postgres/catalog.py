"""What we ask PostgreSQL's system catalogs: tables, types, the publication, the slot.

Rows are decoded with the Relation messages of the log, never with what stands here: the catalog
is today's, the log may be yesterday's. It only answers what the log does not say: which tables
exist now, which columns are a primary key, what an OID of a type means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psycopg
from psycopg import sql

from deltaforge_dagster.positions import parse_lsn
from deltaforge_dagster.sources.postgres.values import CatalogType
from deltaforge_dagster.sources.tables import TablePatterns

SYSTEM_SCHEMAS = ("pg_catalog", "information_schema", "pg_toast*", "pg_temp_*")

_OF_USERS = """
    c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
    AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
"""
"""What a publication can hold, of `pg_class c` and `pg_namespace n`."""

_BARE = """
    EXISTS (
        SELECT FROM (SELECT c.oid AS oid UNION SELECT relid FROM pg_partition_tree(c.oid)) AS leaf
          JOIN pg_class l ON l.oid = leaf.oid
         WHERE l.relkind = 'r' AND (
               l.relreplident = 'n'
               OR l.relreplident = 'd' AND NOT EXISTS (
                  SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisprimary)
               OR l.relreplident = 'i' AND NOT EXISTS (
                  SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisreplident)))
"""
"""Whether `pg_class c`, or a partition of it, has no replica identity."""

Connect = Callable[[float], AbstractContextManager[psycopg.Connection]]
"""Opens a query connection for some seconds: `Server.query`."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that a publication can hold: permanent, ordinary or partitioned."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    """It has no rows of its own, its partitions have them."""
    root: int | None
    """The topmost partitioned table above it, None when it is no partition."""

    @property
    def full_name(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        """The name, quoted for a statement."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A table that matches the pipeline's patterns and is not captured, or not as it should be."""

    table: Table
    sent: bool
    """The publication sends its rows."""
    bare: bool
    """It, or a partition of it, has no replica identity: once published, UPDATE and DELETE fail."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of `pg_replication_slots` (manual: that view). LSNs as integers."""

    name: str
    plugin: str | None
    database: str | None
    temporary: bool
    active_pid: int | None
    restart_lsn: int | None
    confirmed_lsn: int | None
    lost: str
    """Why the server has removed log that the slot needed, empty when it has not."""
    unreserved: bool
    """The server will remove such log soon (`max_slot_wal_keep_size`)."""
    two_phase: bool
    """It sends prepared transactions before they are committed."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server must be and have for us, as one query finds it."""

    version: int
    """As in `server_version_num`: 150004 is 15.4."""
    wal_level: str
    standby: bool
    flushed_lsn: int
    """End of the durable log, 0 on a standby."""
    sender_timeout: float
    """Seconds after which the server drops a silent reader; 0 is never."""


@dataclass(frozen=True, slots=True)
class ColumnNow:
    """A column as the catalog has it now; `operators` is the schema of its type's `=`."""

    name: str
    type_oid: int
    type_name: str
    operators: str


@dataclass(frozen=True, slots=True)
class ColumnsNow:
    """A table's columns by their names; a partitioned table has no rows of its own."""

    partitioned: bool
    columns: dict[str, ColumnNow]


def facts(connection: psycopg.Connection) -> Facts:
    """Return the server's facts."""
    row = connection.execute(
        """
        SELECT current_setting('server_version_num')::int, current_setting('wal_level'),
               pg_is_in_recovery(),
               CASE WHEN pg_is_in_recovery() THEN '0/0' ELSE pg_current_wal_flush_lsn() END::text,
               (SELECT setting::float8 / 1000 FROM pg_settings WHERE name = 'wal_sender_timeout')
        """
    ).fetchone()
    assert row is not None
    return Facts(row[0], row[1], row[2], parse_lsn(row[3]), row[4])


def slot(connection: psycopg.Connection, name: str) -> Slot | None:
    """Return the replication slot of that name, or None."""
    row = connection.execute(
        """
        SELECT plugin, database, temporary, active_pid, restart_lsn::text,
               confirmed_flush_lsn::text, to_jsonb(s)
          FROM pg_replication_slots s WHERE slot_name = %s
        """,
        (name,),
    ).fetchone()
    if row is None:
        return None
    # Columns differ between versions: wal_status (13), two_phase (15), conflicting (16),
    # invalidation_reason (17).
    everything = row[6]
    lost = everything.get("invalidation_reason") or ""
    if not lost and everything.get("conflicting"):
        lost = "a standby's conflict"
    if not lost and everything.get("wal_status") == "lost":
        lost = "max_slot_wal_keep_size"
    return Slot(
        name,
        row[0],
        row[1],
        row[2],
        row[3],
        _lsn(row[4]),
        _lsn(row[5]),
        lost,
        everything.get("wal_status") == "unreserved",
        bool(everything.get("two_phase")),
    )


def tables(connection: psycopg.Connection) -> list[Table]:
    """Return every table of users, by schema and name."""
    rows = connection.execute(
        f"""
        WITH RECURSIVE above(oid, root) AS (
            SELECT inhrelid, inhparent FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
             WHERE c.relispartition
            UNION ALL
            SELECT above.oid, inhparent FROM above JOIN pg_inherits ON inhrelid = above.root
              JOIN pg_class c ON c.oid = inhrelid WHERE c.relispartition
        )
        SELECT c.oid::int8, n.nspname, c.relname, c.relkind = 'p',
               (SELECT a.root::int8 FROM above a
                  JOIN pg_class r ON r.oid = a.root AND NOT r.relispartition
                 WHERE a.oid = c.oid)
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {_OF_USERS}
         ORDER BY 2, 3
        """  # noqa: S608 - of constants
    ).fetchall()
    return [Table(*row) for row in rows]


def captured(found: Sequence[Table], patterns: TablePatterns) -> list[Table]:
    """Return the tables that match; of a partitioned table that does, not its partitions too."""
    matching = [table for table in found if patterns.matches(table.schema, table.name)]
    chosen = {table.oid for table in matching}
    return [table for table in matching if table.root not in chosen]


def without_identity(connection: psycopg.Connection, chosen: Sequence[Table]) -> list[str]:
    """Return `schema.table` of those that have no replica identity, or a partition without one.

    Once such a table is published, PostgreSQL refuses every UPDATE and DELETE of it.
    """
    rows = connection.execute(
        f"""
        SELECT n.nspname || '.' || c.relname
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = ANY (%s::oid[]) AND {_BARE}
         ORDER BY 1
        """,  # noqa: S608 - of constants
        ([table.oid for table in chosen],),
    ).fetchall()
    return [row[0] for row in rows]


def leaves_without_identity(
    connection: psycopg.Connection, chosen: Sequence[Table]
) -> list[sql.Identifier]:
    """Return, of tables and their partitions, those with rows of their own and no replica identity."""
    rows = connection.execute(
        f"""
        SELECT DISTINCT n.nspname, c.relname
          FROM unnest(%s::oid[]) AS chosen(oid),
               LATERAL (SELECT chosen.oid AS oid UNION SELECT relid FROM pg_partition_tree(chosen.oid)) AS leaf
          JOIN pg_class c ON c.oid = leaf.oid AND c.relkind = 'r'
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE {_BARE}
         ORDER BY 1, 2
        """,  # noqa: S608 - of constants
        ([table.oid for table in chosen],),
    ).fetchall()
    return [sql.Identifier(*row) for row in rows]


def uncreatable(connection: psycopg.Connection, chosen: Sequence[Table]) -> tuple[bool, list[str]]:
    """Return whether the role may create publications here, and which tables it does not own."""
    row = connection.execute(
        "SELECT has_database_privilege(current_database(), 'CREATE'),"
        "       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)"
    ).fetchone()
    assert row is not None
    if row[1]:
        return True, []
    rows = connection.execute(
        """
        SELECT n.nspname || '.' || c.relname
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = ANY (%s::oid[]) AND NOT pg_has_role(c.relowner, 'USAGE')
         ORDER BY 1
        """,
        ([table.oid for table in chosen],),
    ).fetchall()
    return bool(row[0]), [one[0] for one in rows]


def uncovered(
    connection: psycopg.Connection, publication: str, patterns: TablePatterns, most: int
) -> list[Uncovered]:
    """Return the tables that match and that a publication does not send, or whose identity is missing.

    Rows of a partition may come as those of the partitioned table that matches, or the other way round; a
    partitioned table counts only if a pattern names it. One query, whose answer has at most `most` rows.
    """
    (matches, given), (root_matches, root_given) = (
        _matching(patterns, schema, name)
        for schema, name in (("n.nspname", "c.relname"), ("rn.nspname", "r.relname"))
    )
    rows = connection.execute(
        f"""
        WITH sent AS (
            SELECT c.oid
              FROM pg_publication_tables t
              JOIN pg_namespace n ON n.nspname = t.schemaname
              JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
             WHERE t.pubname = %s),
        found AS (
            SELECT c.oid, n.nspname, c.relname, c.relkind = 'p' AS partitioned,
                   CASE WHEN c.relispartition THEN pg_partition_root(c.oid)::oid END AS root,
                   c.oid IN (SELECT oid FROM sent) AS sent, {_BARE} AS bare
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE {_OF_USERS} AND {matches})
        SELECT f.oid::int8, f.nspname, f.relname, f.partitioned, f.root::int8, f.sent, f.bare
          FROM found f
         WHERE (f.bare OR NOT f.sent)
           AND (NOT f.partitioned OR f.nspname || '.' || f.relname = ANY (%s))
           AND NOT EXISTS (
               SELECT FROM pg_class r JOIN pg_namespace rn ON rn.oid = r.relnamespace
                WHERE r.oid = f.root AND r.oid IN (SELECT oid FROM sent) AND {root_matches})
         ORDER BY f.bare, 2, 3 LIMIT %s
        """,  # noqa: S608 - of constants
        (
            publication,
            *given,
            [".".join(name) for name in patterns.exact],
            *root_given,
            most,
        ),
    ).fetchall()
    return [Uncovered(Table(*row[:5]), row[5], row[6]) for row in rows]


def absent(connection: psycopg.Connection, patterns: TablePatterns) -> list[str]:
    """Return `schema.table` of every pattern without wildcards that names no table of users."""
    rows = connection.execute(
        f"""
        SELECT named.schema || '.' || named.name
          FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS named(schema, name, place)
         WHERE NOT EXISTS (
               SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = named.schema AND c.relname = named.name AND {_OF_USERS})
         ORDER BY named.place
        """,  # noqa: S608 - of constants
        ([name[0] for name in patterns.exact], [name[1] for name in patterns.exact]),
    ).fetchall()
    return [row[0] for row in rows]


def _matching(patterns: TablePatterns, schema: str, name: str) -> tuple[str, list[str]]:
    """Return the patterns as a condition on two expressions, and its parameters."""
    conditions, given = [], []
    for parts in patterns.parts:
        both = []
        for column, part in zip((schema, name), parts, strict=True):
            both.append(f"starts_with({column}, %s)" if part.prefix else f"{column} = %s")
            given.append(part.text)
        conditions.append(" AND ".join(both))
    return "(" + " OR ".join(conditions) + ")", given


def published(
    connection: psycopg.Connection, publication: str
) -> frozenset[tuple[str, str]] | None:
    """Return (schema, table) of everything a publication sends, None when it does not exist."""
    rows = connection.execute(
        """
        SELECT t.schemaname, t.tablename
          FROM pg_publication p LEFT JOIN pg_publication_tables t USING (pubname)
         WHERE p.pubname = %s
        """,
        (publication,),
    ).fetchall()
    sent = frozenset((row[0], row[1]) for row in rows if row[0] is not None)
    return sent if rows else None


def primary_key(connection: psycopg.Connection, oid: int) -> tuple[str, ...]:
    """Return the columns of a table's primary key in the key's order; empty without one."""
    rows = connection.execute(
        """
        SELECT a.attname
          FROM pg_index i
          CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
          JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
         WHERE i.indrelid = %s AND i.indisprimary AND k.place <= i.indnkeyatts
         ORDER BY k.place
        """,
        (oid,),
    ).fetchall()
    return tuple(row[0] for row in rows)


def named(connection: psycopg.Connection, oid: int) -> tuple[str, str] | None:
    """Return schema and name of a table, None when it no longer exists."""
    row = connection.execute(
        """
        SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE c.oid = %s
        """,
        (oid,),
    ).fetchone()
    return None if row is None else (row[0], row[1])


def columns_now(connection: psycopg.Connection, oid: int, schema: str, name: str) -> ColumnsNow:
    """Return a table's columns; none when it no longer has that name.

    The operators of a type that is not the server's own (citext) stand where the type does.
    """
    rows = connection.execute(
        """
        WITH RECURSIVE base (attnum, type) AS (
            SELECT attnum, atttypid FROM pg_attribute
             WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped
            UNION ALL
            SELECT attnum, typbasetype FROM base JOIN pg_type t ON t.oid = type AND typtype = 'd'
        )
        SELECT c.relkind = 'p', a.attname, a.atttypid::int8, format_type(a.atttypid, a.atttypmod),
               CASE WHEN t.typtype = 'b' AND t.typcategory <> 'A' THEN s.nspname
                    ELSE 'pg_catalog' END
          FROM pg_class c
          JOIN pg_namespace n ON n.oid = c.relnamespace
          JOIN pg_attribute a ON a.attrelid = c.oid
          JOIN base ON base.attnum = a.attnum
          JOIN pg_type t ON t.oid = base.type AND t.typtype <> 'd'
          JOIN pg_namespace s ON s.oid = t.typnamespace
         WHERE c.oid = %(oid)s AND n.nspname = %(schema)s AND c.relname = %(name)s
        """,
        {"oid": oid, "schema": schema, "name": name},
    ).fetchall()
    partitioned = bool(rows) and rows[0][0]
    return ColumnsNow(partitioned, {row[1]: ColumnNow(*row[1:]) for row in rows})


class Catalog:
    """The catalog as the decoder asks it; opens a connection for each question, which is rare.

    With `remade`, types that are gone are those that have their names now.
    """

    _SECONDS = 10.0

    def __init__(self, connect: Connect, *, remade: bool = False) -> None:
        self._connect = connect
        self._remade = remade

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Return the primary key's columns now; empty when there is none, or no such table."""
        with self._connect(self._SECONDS) as connection:
            return primary_key(connection, relation)

    def type(self, oid: int) -> CatalogType | None:
        """Return what the catalog says of a type, None when it no longer exists."""
        with self._connect(self._SECONDS) as connection:
            row = connection.execute(
                """
                SELECT format_type(t.oid, NULL), t.typtype::text,
                       CASE WHEN e.typarray = t.oid THEN e.oid::int8 ELSE 0 END,
                       CASE WHEN e.typarray = t.oid THEN e.typdelim ELSE t.typdelim END::text,
                       t.typbasetype::int8
                  FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem
                 WHERE t.oid = %s
                """,
                (oid,),
            ).fetchone()
        return None if row is None else CatalogType(*row)

    def system_type(self, name: str) -> int | None:
        """Return the OID of the server's own type of that name, None without one."""
        with self._connect(self._SECONDS) as connection:
            row = connection.execute(
                "SELECT oid::int8 FROM pg_type"
                " WHERE typname = %s AND typnamespace = 'pg_catalog'::regnamespace",
                (name,),
            ).fetchone()
        return None if row is None else int(row[0])

    def remade_type(self, schema: str, name: str) -> int | None:
        """Return the OID of the type of that name now, if it is that of one that is gone."""
        if not self._remade:
            return None
        with self._connect(self._SECONDS) as connection:
            row = connection.execute(
                "SELECT t.oid::int8 FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace"
                " WHERE n.nspname = %s AND t.typname = %s",
                (schema, name),
            ).fetchone()
        return None if row is None else int(row[0])


def _lsn(text: str | None) -> int | None:
    return None if text is None else parse_lsn(text)
