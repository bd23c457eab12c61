"""The publication, which selects the tables whose changes the server sends.

A missing publication is created with the tables that match the pipeline's patterns. This happens
before the slot is created: the server looks up the publication as of the log position that it
decodes, and fails if it did not exist then. A comment marks it as ours. Tables that match later are
added to it, and captured from then on. A publication without that comment belongs to somebody else:
it is checked but never changed.

A table without a replica identity is never added to our publication, because PostgreSQL would then
refuse its UPDATEs and DELETEs. It is not captured, and reported; the other tables are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import (
    Commands,
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.findings import Finding, absent_tables, listed, one_line
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.tables import TablePatterns

logger = logging.getLogger(__name__)

_VIA_ROOT_VERSION = 130000  # publish_via_partition_root exists from PostgreSQL 13 on
_COMMENT = "made by deltaforge, which adds the tables that match"
_LOCK_MS = 500  # whoever waits for a table's lock makes all later ones wait behind it
_KINDS = ("insert", "update", "delete", "truncate")
_MAX_GAPS = 50
"""The most tables that are reported, or added, at a time."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a publication lacks for the pipeline's patterns.

    Attributes:
        ours: Whether we created the publication, so that we may change it.
        absent: `schema.table` of named tables that do not exist.
        unpublished: Tables that it could send, but does not.
        bare: Tables without a replica identity that it does not send.
        refused: Tables without a replica identity that it sends: their UPDATEs or DELETEs fail.
        silent: Kinds of statements that it does not send (`insert`, `update`, `delete`,
            `truncate`).
    """

    ours: bool
    absent: Sequence[str]
    unpublished: Sequence[catalog.PublishableTable]
    bare: Sequence[catalog.PublishableTable]
    refused: Sequence[catalog.PublishableTable]
    silent: Sequence[str]


def coverage(connection: psycopg.Connection, name: str, patterns: TablePatterns) -> Coverage | None:
    """Return what a publication lacks; None if it does not exist."""
    row = connection.execute(
        """
        SELECT obj_description(oid, 'pg_publication'), pubinsert, pubupdate, pubdelete, pubtruncate
          FROM pg_publication WHERE pubname = %s
        """,
        (name,),
    ).fetchone()
    if row is None:
        return None
    sends = dict(zip(_KINDS, row[1:], strict=True))
    changes = sends["update"] or sends["delete"]  # one that sends only INSERTs needs no identity
    gaps = catalog.uncovered(connection, name, patterns, _MAX_GAPS)
    return Coverage(
        row[0] == _COMMENT,
        catalog.absent(connection, patterns),
        [gap.table for gap in gaps if not gap.sent and not (gap.bare and changes)],
        [gap.table for gap in gaps if not gap.sent and gap.bare and changes],
        [gap.table for gap in gaps if gap.sent and gap.bare and changes],
        [kind for kind, sent in sends.items() if not sent],
    )


def create(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    patterns: TablePatterns,
    version: int,
) -> None:
    """Create the publication with every existing table that matches and has a replica identity.

    Raises:
        SourceMisconfigured: There is no such table, or a table that is named does not exist.
        PermissionMissing: The role may not create it; the message has the statement for an owner of
            the tables.
        SourceUnavailable: A table is locked by another session; try again.
    """
    tables = catalog.captured(_user_tables(connection, server, patterns), patterns)
    if not tables:
        raise SourceMisconfigured(
            f"{server.where}: no table matches source.config.tables ({patterns}); views, "
            "temporary, unlogged and system tables are never captured"
        )
    bare = set(catalog.without_identity(connection, tables))
    if len(bare) == len(tables):
        raise SourceMisconfigured(
            f"{server.where}: without a primary key or replica identity: "
            f"{listed(sorted(bare))}; once published, their UPDATEs and DELETEs would fail; "
            "give them one, or leave them out of source.config.tables",
            remedy=give_identity(connection, tables),
        )
    if bare:
        logger.warning("%s: %s", server.where, _left_out(connection, sorted(bare), tables).line)
    tables = [table for table in tables if table.full_name not in bare]
    statement = _create_statement(name, tables, version)
    try:
        # One transaction: without its comment, the publication would count as somebody else's.
        with connection.transaction():
            connection.execute(statement)
            connection.execute(
                sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(sql.Identifier(name), _COMMENT)
            )
    except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
        return  # another process created it at the same time
    except psycopg.errors.InsufficientPrivilege as error:
        raise PermissionMissing(
            f"{server.where}: role {server.user!r} may not create publication {name!r} "
            "(it must own the tables and have CREATE on the database); "
            "let an owner of the tables create it",
            remedy=statement.as_string(connection),
        ) from error
    except psycopg.errors.QueryCanceled as error:
        raise SourceUnavailable(
            f"{server.where}: publication {name!r} could not be created in time: a table to be "
            "captured is locked by another session"
        ) from error
    logger.info("%s: created publication %s for %d tables", server.where, name, len(tables))


def drop(connection: psycopg.Connection, server: PostgresSourceServer, name: str) -> None:
    """Drop a publication, if it exists.

    Raises:
        PermissionMissing: The role may not.
    """
    statement = sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name))
    try:
        connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PermissionMissing(
            f"{server.where}: role {server.user!r} may not drop publication {name!r}; "
            f"its owner runs: {statement.as_string(connection)}"
        ) from error


def extend(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, patterns: TablePatterns
) -> None:
    """Add tables that match and are not sent yet to the publication, if we created it.

    Their changes are captured from then on, even by a running reader. If they cannot be added now
    (a table is locked, or belongs to another role), that is logged; the next call tries again.
    """
    lacks = coverage(connection, name, patterns)
    if lacks is None or not lacks.ours or not lacks.unpublished:
        return
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            connection.execute(_add_statement(name, lacks.unpublished))
    except psycopg.Error as error:
        logger.warning(
            "%s: publication %s does not get %s (%s)",
            server.where,
            name,
            _names(lacks.unpublished),
            one_line(str(error)),
        )
    else:
        logger.info(
            "%s: publication %s now sends %s", server.where, name, _names(lacks.unpublished)
        )


def check(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, patterns: TablePatterns
) -> None:
    """Check that the publication sends the tables that the patterns match.

    A missing table that is named without wildcards is an error. One that only matches a wildcard
    may have been created later: that is logged, and does not stop capture of the others.

    Raises:
        PositionLost: The publication does not exist.
        SourceMisconfigured: A named table does not exist or is not sent; the message has the
            remedy.
    """
    lacks = coverage(connection, name, patterns)
    if lacks is None:
        raise missing(server, name)
    if lacks.absent:
        raise _no_tables(server, lacks.absent)
    named = [table for table in lacks.unpublished if (table.schema, table.name) in patterns.exact]
    if named:
        raise SourceMisconfigured(
            f"{server.where}: publication {name!r} does not send {_names(named)} (a "
            "partitioned table also needs publish_via_partition_root = true)",
            remedy=_add(connection, name, named),
        )
    for finding in findings(connection, name, lacks):
        if finding.bad:
            logger.warning("%s: %s", server.where, finding.line)


def missing(server: PostgresSourceServer, name: str) -> PositionLost:
    """Return the error for a publication that does not exist any more."""
    return PositionLost(
        f"{server.where}: publication {name!r} is gone; "
        "the log written without it cannot be decoded. Re-snapshot required"
    )


def too_young(server: PostgresSourceServer, name: str) -> PositionLost:
    """Return the error for log older than the publication, which pgoutput cannot decode."""
    return PositionLost(
        f"{server.where}: publication {name!r} did not exist "
        "when this part of the log was written, which therefore cannot be decoded "
        "(was it dropped and recreated?). Re-snapshot required"
    )


def findings(connection: psycopg.Connection, name: str, lacks: Coverage) -> list[Finding]:
    """Return findings for what a publication lacks, with the statements that fix it."""
    findings = []
    if lacks.absent:
        findings.append(absent_tables(lacks.absent))
    if lacks.unpublished:
        findings.append(
            Finding(
                "publication",
                "error",
                f"not captured, because publication {name!r} does not send them: "
                f"{listed([table.full_name for table in lacks.unpublished])}",
                _add(connection, name, lacks.unpublished),
            )
        )
    if lacks.bare:
        names = [table.full_name for table in lacks.bare]
        left_out = _left_out(connection, names, lacks.bare)
        if not lacks.ours:
            left_out = replace(
                left_out, remedy=(*left_out.commands, _add(connection, name, lacks.bare))
            )
        findings.append(left_out)
    if lacks.refused:
        findings.append(
            Finding(
                "replica identity",
                "error",
                "UPDATEs and DELETEs fail, because they are published without a replica identity: "
                f"{listed([table.full_name for table in lacks.refused])}",
                give_identity(connection, lacks.refused),
            )
        )
    if lacks.silent:
        statement = sql.SQL("ALTER PUBLICATION {} SET (publish = {})").format(
            sql.Identifier(name), sql.Literal(", ".join(_KINDS))
        )
        findings.append(
            Finding(
                "publication",
                "note" if lacks.silent == ["truncate"] else "warning",
                f"publication {name!r} does not send every {', '.join(lacks.silent)}",
                statement.as_string(connection),
            )
        )
    return findings


def _left_out(
    connection: psycopg.Connection, names: Sequence[str], tables: Sequence[catalog.PublishableTable]
) -> Finding:
    """Return the finding that tables without a replica identity are not captured.

    `names` are their names; `tables` contains them, for the remedy.
    """
    return Finding(
        "replica identity",
        "warning",
        "not captured, because without a primary key or replica identity their UPDATEs and DELETEs "
        f"would fail once published: {listed(names)}",
        give_identity(connection, tables),
    )


def give_identity(
    connection: psycopg.Connection, tables: Sequence[catalog.PublishableTable]
) -> Commands:
    """Return the statements that give tables, or their partitions, a replica identity."""
    return tuple(
        sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(leaf).as_string(connection)
        for leaf in catalog.leaves_without_identity(connection, tables)
    )


def creation(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    patterns: TablePatterns,
    version: int,
) -> list[Finding]:
    """Return findings about whether `create` would succeed, without creating anything."""
    tables = catalog.captured(catalog.tables(connection), patterns)
    bare = set(catalog.without_identity(connection, tables))
    good = [table for table in tables if table.full_name not in bare]
    findings = []
    absent = catalog.absent(connection, patterns)
    if absent:
        findings.append(absent_tables(absent))
    if bare:
        left_out = _left_out(connection, sorted(bare), tables)
        findings.append(left_out if good else replace(left_out, level="error"))
    if not good:
        return findings
    may_create, foreign_tables = catalog.uncreatable(connection, good)
    if may_create and not foreign_tables:
        findings.append(Finding("publication", "ok", f"publication {name!r} will be created"))
        return findings
    obstacles = [] if may_create else ["it lacks CREATE on the database"]
    obstacles += [f"it does not own {listed(foreign_tables)}"] if foreign_tables else []
    findings.append(
        Finding(
            "publication",
            "error",
            f"publication {name!r} is not there, and role {server.user!r} may not create it: "
            f"{', '.join(obstacles)}; let an owner of the tables create it",
            _create_statement(name, good, version).as_string(connection),
        )
    )
    return findings


def foreign(connection: psycopg.Connection, name: str, patterns: TablePatterns) -> list[int]:
    """Return the OIDs of tables that the publication sends but the pipeline does not capture."""
    sent = catalog.published(connection, name) or frozenset()
    return [
        table.oid
        for table in catalog.tables(connection)
        if (table.schema, table.name) in sent and not patterns.matches(table.schema, table.name)
    ]


def _user_tables(
    connection: psycopg.Connection, server: PostgresSourceServer, patterns: TablePatterns
) -> list[catalog.PublishableTable]:
    """Return every user table, after checking that all named tables exist."""
    absent = catalog.absent(connection, patterns)
    if absent:
        raise _no_tables(server, absent)
    return catalog.tables(connection)


def _no_tables(server: PostgresSourceServer, absent: Sequence[str]) -> SourceMisconfigured:
    return SourceMisconfigured(f"{server.where}: {absent_tables(absent).text}")


def _names(tables: Sequence[catalog.PublishableTable]) -> str:
    return ", ".join(table.full_name for table in tables)


def _add(
    connection: psycopg.Connection, name: str, tables: Sequence[catalog.PublishableTable]
) -> str:
    return _add_statement(name, tables).as_string(connection)


def _add_statement(name: str, tables: Sequence[catalog.PublishableTable]) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )


def _create_statement(
    name: str, tables: Sequence[catalog.PublishableTable], version: int
) -> sql.Composed:
    statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )
    if version >= _VIA_ROOT_VERSION:
        # Rows of a partition are sent under the name of the partitioned table that the patterns
        # match.
        statement += sql.SQL(" WITH (publish_via_partition_root = true)")
    return statement
