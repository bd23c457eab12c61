"""Inspect a PostgreSQL server before and between runs: does it meet the requirements of capture?

Only queries the catalog (manual: "System Information Functions and Operators"), so that no table is
read or locked and nothing is written. Errors that would stop a run come from the functions that the
run itself uses; this module adds the points that a run does not check.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.sources.findings import (
    Finding,
    Level,
    finding_errors,
    listed,
    retention_level,
)
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.connection.service import (
    after_restart,
    more_log,
    no_room,
    recognized,
)
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.tables import TablePatterns

_IDENTIFY_SECONDS = 5.0
_MIB = 1 << 20


def preflight(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    patterns: TablePatterns,
    *,
    slot: str,
    publication: str,
    position: LsnPosition | None,
    failover: bool,
    needed_by: str | None,
) -> list[Finding]:
    """Return the findings, in the order in which problems have to be fixed.

    Args:
        connection: A connection to the server; all queries together take a few seconds.
        server: The server, for messages.
        patterns: The tables to capture.
        slot: Name of the replication slot.
        publication: Name of the publication.
        position: The captured position; None before the first run.
        failover: Whether a new slot would be created as a failover slot.
        needed_by: What needs to read the tables themselves, for messages; None if nothing does.

    Raises:
        DeltaforgeError: The server cannot be reached.
    """
    version = connection.info.parameter_status("server_version") or "unknown"
    existing = catalog.slot(connection, slot)
    service = recognized(connection)
    suffix = f", {service.name}" if service.managed else ""
    connected = Finding("connection", "ok", f"{server.where}, version {version}{suffix}")
    if catalog.settings(connection).standby:  # whether it has a slot says nothing about the primary
        text = (
            "this is a standby; changes are read from the primary: "
            f"in source.config.dsn use {service.primary}"
        )
        return [connected, Finding("server", "error", text)]
    return [
        connected,
        *([Finding("service", "note", service.caution)] if service.caution else []),
        *_log(connection, server),
        *_slot(connection, server, slot, existing, position, failover=failover),
        *_publication(connection, server, patterns, publication, slot_exists=existing is not None),
        *_tables(connection, server, patterns, needed_by),
    ]


def _log(connection: psycopg.Connection, server: PostgresSourceServer) -> list[Finding]:
    findings: list[Finding] = []
    facts = catalog.settings(connection)
    if facts.decodes:
        rises = "" if facts.wal_level == "logical" else ", which the first logical slot raises"
        findings.append(Finding("wal_level", "ok", f"wal_level is {facts.wal_level}{rises}"))
    else:
        restart, statements = after_restart(connection, "wal_level", "logical")
        text = f"wal_level is {facts.wal_level}; {restart}"
        findings.append(Finding("wal_level", "error", text, statements))
    with finding_errors("grants", findings):
        # Managed services grant the right in ways that no catalog shows, so try to use it.
        try:
            server.identify(_IDENTIFY_SECONDS)
        except SourceUnavailable as error:
            text = f"whether role {server.user!r} may replicate could not be tried: {error}"
            findings.append(Finding("grants", "warning", text))
        else:
            findings.append(Finding("grants", "ok", f"role {server.user!r} may replicate"))
    return findings


def _slot(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    name: str,
    existing: catalog.ReplicationSlot | None,
    position: LsnPosition | None,
    *,
    failover: bool,
) -> list[Finding]:
    findings: list[Finding] = []
    if existing is None and position is None:
        with finding_errors("slot", findings):
            if failover:
                slots.check_failover(server, connection.info.server_version)
            findings.append(_slot_creation(connection, name))
        return findings
    with finding_errors("slot", findings):
        slot = slots.check(existing, server, name)
        if position is not None:
            flushed = catalog.facts(connection, server).flushed_lsn
            slots.check_start(slot, server, name, position.lsn, flushed)
        findings.append(Finding("slot", "ok", f"replication slot {name!r} is there"))
        if failover and not slot.failover:
            slots.check_failover(server, connection.info.server_version)
            text = f"replication slot {name!r} becomes a failover slot when the next run begins"
            findings.append(Finding("slot", "note", text))
        findings.append(_retention(connection, server, slot))
        findings += _restart(connection, server)
    return findings


def _restart(connection: psycopg.Connection, server: PostgresSourceServer) -> list[Finding]:
    """Note if runs begin later than they could because of a missing right."""
    grant = slots.missing_grant(connection, server.user)
    if grant is None:
        return []
    text = (
        f"role {server.user!r} may not have the server log its running transactions, "
        "so a run begins by decoding up to 15 s of log again"
    )
    return [_needs_superuser(connection, "slot", "note", text, grant)]


def _needs_superuser(
    connection: psycopg.Connection, subject: str, level: Level, text: str, grant: str
) -> Finding:
    """Return a finding whose remedy needs a superuser; no remedy on services that have none."""
    service = recognized(connection)
    if service.managed:
        why = f"only a superuser can grant that, and on {service.name} nobody is one"
        return Finding(subject, level, f"{text} ({why})")
    return Finding(subject, level, text, grant)


def _slot_creation(connection: psycopg.Connection, name: str) -> Finding:
    """Check that the server has room for the slot and walsender that the first run creates."""
    row = connection.execute(
        """
        SELECT current_setting('max_replication_slots')::int
                   > (SELECT count(*) FROM pg_replication_slots),
               current_setting('max_wal_senders')::int > (SELECT count(*) FROM pg_stat_replication)
        """
    ).fetchone()
    assert row is not None
    if not row[0]:
        return Finding(
            "slot", "error", *no_room(connection, "replication slots", "max_replication_slots")
        )
    if not row[1]:
        return Finding("slot", "error", *no_room(connection, "WAL senders", "max_wal_senders"))
    return Finding("slot", "ok", f"replication slot {name!r} will be created")


def _retention(
    connection: psycopg.Connection, server: PostgresSourceServer, slot: catalog.ReplicationSlot
) -> Finding:
    """Compare the log that the slot retains with its limit (`max_slot_wal_keep_size`)."""
    row = connection.execute(
        "SELECT setting::int8 * 1048576 FROM pg_settings WHERE name = 'max_slot_wal_keep_size'"
    ).fetchone()
    limit = None if row is None else row[0]
    flushed = catalog.facts(connection, server).flushed_lsn
    kept = 0 if slot.restart_lsn is None else max(0, flushed - slot.restart_lsn)
    text = f"the slot keeps {kept / _MIB:,.0f} MiB of log"
    if limit is None or limit < 0:
        return Finding("retention", "ok", f"{text}, and may keep any amount")
    used = kept / limit if limit else 1.0
    level = "error" if slot.unreserved else retention_level(used)
    text += f" of {limit / _MIB:,.0f} (max_slot_wal_keep_size)"
    if slot.unreserved:
        text += "; it is more than that, and lost at the next checkpoint"
    elif level == "ok" and limit <= slots.MAX_UNCONFIRMED_BYTES:
        level = "warning"
        text += (
            f"; while the captured tables are quiet, a run confirms what others write only each "
            f"{slots.MAX_UNCONFIRMED_BYTES / _MIB:,.0f} MiB, so the slot can be lost before"
        )
    if level == "ok":
        return Finding("retention", level, text)
    more, remedy = more_log(connection, kept)
    return Finding("retention", level, f"{text}; {more}", remedy)


def _publication(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    patterns: TablePatterns,
    name: str,
    *,
    slot_exists: bool,
) -> list[Finding]:
    coverage = publications.coverage(connection, name, patterns)
    if coverage is None and not slot_exists:
        version = connection.info.server_version
        return publications.creation(connection, server, name, patterns, version)
    findings: list[Finding] = []
    with finding_errors("publication", findings):
        if coverage is None:
            raise publications.missing(server, name)
        findings += publications.findings(connection, name, coverage)
        if not findings:
            findings.append(Finding("publication", "ok", f"publication {name!r} sends the tables"))
    return findings


def _tables(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    patterns: TablePatterns,
    needed_by: str | None,
) -> list[Finding]:
    chosen = catalog.captured(catalog.tables(connection), patterns)
    if not chosen:
        return [Finding("tables", "error", f"no table matches source.config.tables ({patterns})")]
    findings = [
        Finding("tables", "ok", f"{len(chosen)} match source.config.tables"),
        *patterns.unmatched([(table.schema, table.name) for table in chosen]),
    ]
    rows = connection.execute(
        """
        SELECT c.oid::int8, c.relreplident::text,
               EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)
          FROM unnest(%s::oid[]) WITH ORDINALITY AS chosen(oid, place)
          JOIN pg_class c ON c.oid = chosen.oid ORDER BY place
        """,
        ([table.oid for table in chosen],),
    ).fetchall()
    by_oid = {table.oid: table for table in chosen}
    bare = set(catalog.without_identity(connection, chosen))  # reported with the publication
    partial = [
        by_oid[oid]
        for oid, identity, _ in rows
        if identity != "f" and by_oid[oid].full_name not in bare
    ]
    if partial:
        findings.append(
            Finding(
                "replica identity",
                "note",
                f"not FULL: {listed([table.full_name for table in partial])}; the old row of an"
                " update is not sent, of a delete only its key",
                [
                    sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL")
                    .format(table.identifier)
                    .as_string(connection)
                    for table in partial
                ],
            )
        )
    without = [by_oid[oid] for oid, _, has_key in rows if not has_key]
    if without:
        keys = [
            sql.SQL("ALTER TABLE {} ADD PRIMARY KEY (...)").format(table.identifier)
            for table in without
        ]
        findings.append(
            Finding(
                "keys",
                "note",
                f"no primary key: {listed([table.full_name for table in without])}; their messages"
                " have no key of the row, so sinks cannot keep one row's changes in order or"
                " compact them",
                [statement.as_string(connection) for statement in keys],
            )
        )
    return findings + _read_rights(connection, server, chosen, needed_by)


def _read_rights(
    connection: psycopg.Connection,
    server: PostgresSourceServer,
    tables: Sequence[catalog.PublishableTable],
    needed_by: str | None,
) -> list[Finding]:
    """Return a finding about the tables that the role may not read completely, with the grants.

    Args:
        connection: A connection to the server.
        server: The server, for messages.
        tables: The captured tables.
        needed_by: What needs to read them; None if nothing does yet, then the finding is a note.
    """
    rows = connection.execute(
        """
        SELECT c.oid::int8, n.nspname, has_schema_privilege(n.oid, 'USAGE'),
               NOT EXISTS (SELECT FROM pg_attribute a
                            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                              AND NOT has_column_privilege(c.oid, a.attnum, 'SELECT')),
               row_security_active(c.oid), pg_get_userbyid(c.relowner), c.relforcerowsecurity
          FROM unnest(%s::oid[]) WITH ORDINALITY AS chosen(oid, place)
          JOIN pg_class c ON c.oid = chosen.oid JOIN pg_namespace n ON n.oid = c.relnamespace
         ORDER BY place
        """,
        ([table.oid for table in tables],),
    ).fetchall()
    by_oid = {table.oid: table for table in tables}
    role = sql.Identifier(server.user)
    closed = sorted({schema for _, schema, usable, *_ in rows if not usable})
    unreadable = [by_oid[oid] for oid, _, _, readable, *_ in rows if not readable]
    filtered = [(by_oid[oid], *owner) for oid, _, _, _, policies, *owner in rows if policies]
    grants = []
    if closed:
        schemas = sql.SQL(", ").join(map(sql.Identifier, closed))
        grants.append(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(schemas, role))
    if unreadable:
        names = sql.SQL(", ").join(table.identifier for table in unreadable)
        grants.append(sql.SQL("GRANT SELECT ON {} TO {}").format(names, role))
    why = " (row-level security would leave rows out)" if filtered else ""
    if filtered and recognized(connection).managed:
        # Only a superuser can grant BYPASSRLS. A table's policies do not apply to members of its
        # owner.
        owners = sorted({owner for _, owner, forced in filtered if not forced})
        grants += [
            sql.SQL("GRANT {} TO {}").format(sql.Identifier(owner), role) for owner in owners
        ]
        strict = [table.full_name for table, _, forced in filtered if forced]
        if strict:
            why = f" (row-level security is forced on {listed(strict)}: only BYPASSRLS passes it)"
    elif filtered:
        grants.append(sql.SQL("ALTER ROLE {} BYPASSRLS").format(role))
    missing = [
        by_oid[oid].full_name
        for oid, _, usable, readable, policies, *_ in rows
        if not (usable and readable) or policies
    ]
    if not missing:
        return [Finding("grants", "ok", f"role {server.user!r} may read the tables")]
    text = f"role {server.user!r} may not read all of {listed(missing)}{why}"
    return [
        Finding(
            "grants",
            "note" if needed_by is None else "error",
            f"{text}: the stream works, snapshots do not"
            if needed_by is None
            else f"{text}, which {needed_by} needs",
            [grant.as_string(connection) for grant in grants],
        )
    ]


def heartbeat_right(connection: psycopg.Connection, server: PostgresSourceServer) -> Finding:
    """Check whether the role may write heartbeats.

    At most a warning, since capture works without them.
    """
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
    text = f"role {server.user!r} may not write heartbeats (engine.postgres.heartbeat_seconds)"
    return _needs_superuser(connection, "heartbeat", "warning", text, grant.as_string(connection))
