"""The publication: which tables' changes the server sends.

A missing one is created, with the tables that match the pipeline's patterns, before the slot: the
server looks a publication up as it was at the place in the log it decodes, and fails when it was
not there yet. It carries a comment that says so, and gets the tables that match later, from when
they are added on. One without that comment belongs to somebody: it is checked and never changed.

A table without a replica identity never gets into a publication of ours: PostgreSQL would refuse its
UPDATEs and DELETEs from then on. It is not captured, and said to be so, while the others are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import (
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.findings import Finding, each, listed, one_line
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.tables import TablePatterns

logger = logging.getLogger(__name__)

_VIA_ROOT_VERSION = 130000
_OURS = "made by deltaforge, which adds the tables that match"
_LOCK_MS = 500
_KINDS = ("insert", "update", "delete", "truncate")
_MOST = 50
"""As many tables are named, or added at a time."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a publication does not send of what the pipeline's patterns ask for.

    Attributes:
        ours: It was made here, so that it may be changed.
        absent: `schema.table` that the patterns name and that is no table here.
        unpublished: Tables that it could publish, and does not.
        bare: Tables without a replica identity that it does not send.
        refused: Tables without a replica identity that it sends: their UPDATEs or DELETEs fail.
        silent: Kinds of statements that it does not send, of any table.
    """

    ours: bool
    absent: Sequence[str]
    unpublished: Sequence[catalog.PublishableTable]
    bare: Sequence[catalog.PublishableTable]
    refused: Sequence[catalog.PublishableTable]
    silent: Sequence[str]


def coverage(connection: psycopg.Connection, name: str, patterns: TablePatterns) -> Coverage | None:
    """Return what a publication does not send; None when there is no such publication."""
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
    found = catalog.uncovered(connection, name, patterns, _MOST)
    return Coverage(
        row[0] == _OURS,
        catalog.absent(connection, patterns),
        [one.table for one in found if not one.sent and not (one.bare and changes)],
        [one.table for one in found if not one.sent and one.bare and changes],
        [one.table for one in found if one.sent and one.bare and changes],
        [kind for kind, sent in sends.items() if not sent],
    )


def create(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    patterns: TablePatterns,
    version: int,
) -> None:
    """Create the publication with every table that matches now and has a replica identity.

    Raises:
        SourceMisconfigured: There is none, or one that is named does not exist.
        PermissionMissing: The role may not; the message has the statement for somebody who may.
        SourceUnavailable: A table stayed locked.
    """
    tables = catalog.captured(_existing(connection, server, patterns), patterns)
    if not tables:
        raise SourceMisconfigured(
            f"{server.where}: no table matches source.config.tables ({patterns}); views, "
            "temporary, unlogged and system tables are never captured"
        )
    bare = set(catalog.without_identity(connection, tables))
    if len(bare) == len(tables):
        raise SourceMisconfigured(
            f"{server.where}: without a primary key or replica identity: {listed(sorted(bare))}; once "
            "published, their UPDATEs and DELETEs would fail; run: "
            f"{give_identity(connection, tables)}; or leave them out of source.config.tables"
        )
    if bare:
        logger.warning("%s: %s", server.where, _left_out(connection, sorted(bare), tables).line)
    tables = [table for table in tables if table.full_name not in bare]
    statement = _creating(name, tables, version)
    try:
        with connection.transaction():
            connection.execute(statement)
            connection.execute(
                sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(sql.Identifier(name), _OURS)
            )
    except psycopg.errors.DuplicateObject:
        return  # somebody else was quicker, perhaps this pipeline's other process
    except psycopg.errors.InsufficientPrivilege as error:
        raise PermissionMissing(
            f"{server.where}: role {server.user!r} may not create publication {name!r} (it must own "
            f"the tables and have CREATE on the database); as superuser run: "
            f"{statement.as_string(connection)}"
        ) from error
    except psycopg.errors.QueryCanceled as error:
        raise SourceUnavailable(
            f"{server.where}: publication {name!r} could not be created in time: a table to be "
            "captured is locked by another session"
        ) from error
    logger.info("%s: created publication %s for %d tables", server.where, name, len(tables))


def extend(
    connection: psycopg.Connection, server: PostgresSourceServer, name: str, patterns: TablePatterns
) -> None:
    """Add the tables that match and are not sent, to a publication that was made here.

    Their changes are captured from then on, also by a reader that is at work. What cannot be added now (a
    table is locked, or belongs to another role) is logged, and tried again the next time.
    """
    lacks = coverage(connection, name, patterns)
    if lacks is None or not lacks.ours or not lacks.unpublished:
        return
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            connection.execute(_adding(name, lacks.unpublished))
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
    """Check that the publication sends what the patterns ask for.

    A table that is named and could be sent is an error. One that only matches a wildcard was perhaps
    created later: it is not captured, which is logged, and does not stop the others.

    Raises:
        PositionLost: The publication is gone.
        SourceMisconfigured: A table is missing; the message has the remedy.
    """
    lacks = coverage(connection, name, patterns)
    if lacks is None:
        raise missing(server, name)
    if lacks.absent:
        raise _no_tables(server, lacks.absent)
    named = [table for table in lacks.unpublished if (table.schema, table.name) in patterns.exact]
    if named:
        raise SourceMisconfigured(
            f"{server.where}: publication {name!r} does not send {_names(named)}; run: "
            f"{_add(connection, name, named)} (a partitioned table also needs "
            "publish_via_partition_root = true)"
        )
    for finding in findings(connection, name, lacks):
        if finding.bad:
            logger.warning("%s: %s", server.where, finding.line)


def missing(server: PostgresSourceServer, name: str) -> PositionLost:
    """Return the error for a publication that is gone."""
    return PositionLost(
        f"{server.where}: publication {name!r} is gone; the log written without it cannot be decoded. "
        "Re-snapshot required"
    )


def too_young(server: PostgresSourceServer, name: str) -> PositionLost:
    """Return the error for log from before the publication was created, which pgoutput cannot decode."""
    return PositionLost(
        f"{server.where}: publication {name!r} did not exist when this part of the log was written, which "
        "therefore cannot be decoded (was it dropped and recreated?). Re-snapshot required"
    )


def findings(connection: psycopg.Connection, name: str, lacks: Coverage) -> list[Finding]:
    """Return what a publication does not send as findings, with the statements that change it."""
    found = []
    if lacks.absent:
        found.append(
            Finding(
                "tables",
                "error",
                f"not captured, because no such table is there: {listed(lacks.absent)}",
            )
        )
    if lacks.unpublished:
        found.append(
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
                left_out, remedy=f"{left_out.remedy}; {_add(connection, name, lacks.bare)}"
            )
        found.append(left_out)
    if lacks.refused:
        found.append(
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
        found.append(
            Finding(
                "publication",
                "note" if lacks.silent == ["truncate"] else "warning",
                f"publication {name!r} does not send every {', '.join(lacks.silent)}",
                statement.as_string(connection),
            )
        )
    return found


def _left_out(
    connection: psycopg.Connection, names: Sequence[str], tables: Sequence[catalog.PublishableTable]
) -> Finding:
    """Return that tables without a replica identity, which are among `tables`, are not captured."""
    return Finding(
        "replica identity",
        "warning",
        "not captured, because without a primary key or replica identity their UPDATEs and DELETEs "
        f"would fail once published: {listed(names)}",
        give_identity(connection, tables),
    )


def give_identity(
    connection: psycopg.Connection, tables: Sequence[catalog.PublishableTable]
) -> str:
    """Return the statements that give tables, or their partitions, a replica identity."""
    return each(
        [
            sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(leaf).as_string(connection)
            for leaf in catalog.leaves_without_identity(connection, tables)
        ]
    )


def creation(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    patterns: TablePatterns,
    version: int,
) -> list[Finding]:
    """Return whether `create` would succeed, as findings; makes nothing."""
    tables = catalog.captured(catalog.tables(connection), patterns)
    bare = set(catalog.without_identity(connection, tables))
    good = [table for table in tables if table.full_name not in bare]
    found = []
    absent = catalog.absent(connection, patterns)
    if absent:
        found.append(Finding("tables", "error", str(_no_tables(server, absent))))
    if bare:
        left_out = _left_out(connection, sorted(bare), tables)
        found.append(left_out if good else replace(left_out, level="error"))
    if not good:
        return found
    may_create, foreign_tables = catalog.uncreatable(connection, good)
    if may_create and not foreign_tables:
        found.append(Finding("publication", "ok", f"publication {name!r} will be created"))
        return found
    lacks = [] if may_create else ["it lacks CREATE on the database"]
    lacks += [f"it does not own {listed(foreign_tables)}"] if foreign_tables else []
    found.append(
        Finding(
            "publication",
            "error",
            f"publication {name!r} is not there, and role {server.user!r} may not create it: "
            f"{', '.join(lacks)}; let an owner or superuser create it",
            _creating(name, good, version).as_string(connection),
        )
    )
    return found


def foreign(connection: psycopg.Connection, name: str, patterns: TablePatterns) -> list[int]:
    """Return the OIDs of tables that the publication sends and the pipeline does not capture."""
    sent = catalog.published(connection, name) or frozenset()
    return [
        table.oid
        for table in catalog.tables(connection)
        if (table.schema, table.name) in sent and not patterns.matches(table.schema, table.name)
    ]


def _existing(
    connection: psycopg.Connection, server: PostgresSourceServer, patterns: TablePatterns
) -> list[catalog.PublishableTable]:
    """Return every table of users, after checking that those named are among them."""
    absent = catalog.absent(connection, patterns)
    if absent:
        raise _no_tables(server, absent)
    return catalog.tables(connection)


def _no_tables(server: PostgresSourceServer, absent: Sequence[str]) -> SourceMisconfigured:
    return SourceMisconfigured(
        f"{server.where}: source.config.tables names what is no table here: {', '.join(absent)}"
    )


def _names(tables: Sequence[catalog.PublishableTable]) -> str:
    return ", ".join(table.full_name for table in tables)


def _add(
    connection: psycopg.Connection, name: str, tables: Sequence[catalog.PublishableTable]
) -> str:
    return _adding(name, tables).as_string(connection)


def _adding(name: str, tables: Sequence[catalog.PublishableTable]) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )


def _creating(name: str, tables: Sequence[catalog.PublishableTable], version: int) -> sql.Composed:
    statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )
    if version >= _VIA_ROOT_VERSION:
        # Rows of a partition carry the name of the partitioned table that the patterns chose.
        statement += sql.SQL(" WITH (publish_via_partition_root = true)")
    return statement
