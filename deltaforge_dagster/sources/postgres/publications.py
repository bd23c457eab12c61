"""The publication: which tables' changes the server sends.

A missing one is created, with the tables that match the pipeline's patterns, before the slot: the
server looks a publication up as it was at the place in the log it decodes, and fails when it was
not there yet. It carries a comment that says so, and gets the tables that match later, from when
they are added on. One without that comment belongs to somebody: it is checked and never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import PermissionMissing, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.postgres import catalog
from deltaforge_dagster.sources.postgres.connection import Server
from deltaforge_dagster.sources.postgres.refusals import one_line
from deltaforge_dagster.sources.tables import TablePatterns

logger = logging.getLogger(__name__)

_VIA_ROOT_VERSION = 130000
_OURS = "made by deltaforge, which adds the tables that match"
_LOCK_MS = 500


def create(
    connection: psycopg.Connection, server: Server, name: str, patterns: TablePatterns, version: int
) -> None:
    """Create the publication with every table that matches now.

    Raises:
        SourceMisconfigured: No table matches, one that is named does not exist, or publishing one
            would make statements of its users fail.
        PermissionMissing: The role may not; the message has the statement for somebody who may.
        SourceUnavailable: A table stayed locked.
    """
    tables = catalog.captured(_existing(connection, server, patterns), patterns)
    if not tables:
        raise SourceMisconfigured(
            f"{server.where}: no table matches source.config.tables; views, temporary, unlogged "
            "and system tables are never captured"
        )
    bare = catalog.without_identity(connection, tables)
    if bare:
        raise SourceMisconfigured(
            f"{server.where}: without a primary key or replica identity: {', '.join(bare)}; once "
            "published, their UPDATEs and DELETEs would fail; run ALTER TABLE ... REPLICA IDENTITY "
            "FULL for each, or leave them out of source.config.tables"
        )
    statement = sql.SQL("CREATE PUBLICATION {} FOR TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )
    if version >= _VIA_ROOT_VERSION:
        # Rows of a partition carry the name of the partitioned table that the patterns chose.
        statement += sql.SQL(" WITH (publish_via_partition_root = true)")
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
    connection: psycopg.Connection, server: Server, name: str, patterns: TablePatterns
) -> None:
    """Add the tables that match and are not sent, to a publication that was made here.

    Their changes are captured from then on. What cannot be added now (a table is locked, or has no
    replica identity, or belongs to another role) is logged, and tried again the next time.
    """
    row = connection.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s",
        (name,),
    ).fetchone()
    sent = catalog.published(connection, name)
    if row is None or row[0] != _OURS or sent is None:
        return
    missing = _missing(catalog.tables(connection), sent, patterns)
    bare = set(catalog.without_identity(connection, missing)) if missing else set()
    missing = [table for table in missing if table.full_name not in bare]
    if not missing:
        return
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            connection.execute(_adding(name, missing))
    except psycopg.Error as error:
        logger.warning(
            "%s: publication %s does not get %s (%s)",
            server.where,
            name,
            _names(missing),
            one_line(str(error)),
        )
    else:
        logger.info("%s: publication %s now sends %s", server.where, name, _names(missing))


def check(
    connection: psycopg.Connection, server: Server, name: str, patterns: TablePatterns
) -> None:
    """Check that the publication sends what the patterns ask for.

    A table that is named and not sent is an error. One that only matches a wildcard was perhaps
    created later: it is not captured, which is logged, and does not stop the others.

    Raises:
        SourceMisconfigured: The publication or a table is missing; the message has the remedy.
    """
    sent = catalog.published(connection, name)
    if sent is None:
        raise SourceMisconfigured(
            f"{server.where}: publication {name!r} is gone; the log written without it cannot be "
            "decoded"
        )
    found = _existing(connection, server, patterns)
    missing = _missing(found, sent, patterns)
    named = [table for table in missing if (table.schema, table.name) in patterns.exact]
    if named:
        raise SourceMisconfigured(
            f"{server.where}: publication {name!r} does not send {_names(named)}; run: "
            f"{_add(connection, name, named)} (a partitioned table also needs "
            "publish_via_partition_root = true)"
        )
    if missing:
        logger.warning(
            "%s: not captured, because publication %s does not send them: %s; run: %s",
            server.where,
            name,
            _names(missing),
            _add(connection, name, missing),
        )


def foreign(connection: psycopg.Connection, name: str, patterns: TablePatterns) -> list[int]:
    """Return the OIDs of tables that the publication sends and the pipeline does not capture."""
    sent = catalog.published(connection, name) or frozenset()
    return [
        table.oid
        for table in catalog.tables(connection)
        if (table.schema, table.name) in sent and not patterns.matches(table.schema, table.name)
    ]


def _existing(
    connection: psycopg.Connection, server: Server, patterns: TablePatterns
) -> list[catalog.Table]:
    """Return every table of users, after checking that those named are among them."""
    found = catalog.tables(connection)
    existing = {(table.schema, table.name) for table in found}
    absent = [".".join(name) for name in patterns.exact if name not in existing]
    if absent:
        raise SourceMisconfigured(
            f"{server.where}: source.config.tables names what is no table here: {', '.join(absent)}"
        )
    return found


def _missing(
    found: Sequence[catalog.Table], sent: Collection[tuple[str, str]], patterns: TablePatterns
) -> list[catalog.Table]:
    """Return the tables that match and whose rows do not come, or under a name that is not ours.

    Rows of a partition may come as the partitioned table's, or the other way round.
    """
    arriving = {table.oid for table in found if (table.schema, table.name) in sent}
    wanted = {table.oid for table in found if patterns.matches(table.schema, table.name)}
    return [
        table
        for table in found
        if table.oid in wanted
        and table.oid not in arriving
        and table.root not in wanted & arriving
        and (not table.partitioned or (table.schema, table.name) in patterns.exact)
    ]


def _names(tables: Sequence[catalog.Table]) -> str:
    return ", ".join(table.full_name for table in tables)


def _add(connection: psycopg.Connection, name: str, tables: Sequence[catalog.Table]) -> str:
    return _adding(name, tables).as_string(connection)


def _adding(name: str, tables: Sequence[catalog.Table]) -> sql.Composed:
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(
        sql.Identifier(name), sql.SQL(", ").join(table.identifier for table in tables)
    )
