"""What our role may do beside replicating, as findings: read tables, write heartbeats.

Only the catalog is asked (manual: "System Information Functions and Operators", "Access Privilege
Inquiry Functions"), so that nothing is read, locked or written to find out.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from deltaforge_dagster.sources.findings import Finding, listed
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer


def reading(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    tables: Sequence[catalog.PublishableTable],
    needed_by: str | None,
) -> list[Finding]:
    """Return which tables the role may not read as a whole, with the statements that let it.

    Args:
        connection: Where to ask.
        server: Its names.
        tables: The captured ones.
        needed_by: What reads them; None when nothing does yet, which makes it a note.
    """
    rows = connection.execute(
        """
        SELECT c.oid::int8, n.nspname, has_schema_privilege(n.oid, 'USAGE'),
               NOT EXISTS (SELECT FROM pg_attribute a
                            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                              AND NOT has_column_privilege(c.oid, a.attnum, 'SELECT')),
               row_security_active(c.oid)
          FROM unnest(%s::oid[]) WITH ORDINALITY AS chosen(oid, place)
          JOIN pg_class c ON c.oid = chosen.oid JOIN pg_namespace n ON n.oid = c.relnamespace
         ORDER BY place
        """,
        ([table.oid for table in tables],),
    ).fetchall()
    by_oid = {table.oid: table for table in tables}
    role = sql.Identifier(server.user)
    closed = sorted({schema for _, schema, usable, _, _ in rows if not usable})
    unreadable = [by_oid[oid] for oid, _, _, readable, _ in rows if not readable]
    filtered = [by_oid[oid] for oid, _, _, _, policies in rows if policies]
    grants = []
    if closed:
        schemas = sql.SQL(", ").join(map(sql.Identifier, closed))
        grants.append(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schemas, role))
    if unreadable:
        names = sql.SQL(", ").join(table.identifier for table in unreadable)
        grants.append(sql.SQL("GRANT SELECT ON {} TO {}").format(names, role))
    if filtered:
        grants.append(sql.SQL("ALTER ROLE {} BYPASSRLS").format(role))
    if not grants:
        return [Finding("grants", "ok", f"role {server.user!r} may read the tables")]
    missing = [
        by_oid[oid].full_name
        for oid, _, usable, readable, policies in rows
        if not (usable and readable) or policies
    ]
    why = " (row-level security would leave rows out)" if filtered else ""
    text = f"role {server.user!r} may not read all of {listed(missing)}{why}"
    return [
        Finding(
            "grants",
            "note" if needed_by is None else "error",
            f"{text}: the stream works, snapshots do not"
            if needed_by is None
            else f"{text}, which {needed_by} needs",
            "; ".join(one.as_string(connection) for one in grants),
        )
    ]


def heartbeat(connection: psycopg.Connection, server: PostgresSourceServer) -> Finding:
    """Return whether the role may write heartbeats; without them the log is read all the same."""
    rows = connection.execute(
        """
        SELECT p.oid::regprocedure::text, has_function_privilege(p.oid, 'EXECUTE') FROM pg_proc p
         WHERE p.pronamespace = 'pg_catalog'::regnamespace
           AND p.proname = 'pg_logical_emit_message' AND p.proargtypes[2] = 'text'::regtype
        """
    ).fetchall()
    refused = [name for name, allowed in rows if not allowed]
    if not refused:
        return Finding("heartbeat", "ok", f"role {server.user!r} may write heartbeats")
    grant = sql.SQL("GRANT EXECUTE ON FUNCTION {} TO {}").format(
        sql.SQL(", ").join(map(sql.SQL, refused)), sql.Identifier(server.user)
    )
    return Finding(
        "heartbeat",
        "warning",
        f"role {server.user!r} may not write heartbeats (engine.postgres.heartbeat_seconds)",
        grant.as_string(connection),
    )
