"""Inspect a Turso, libSQL or SQLite database: does it meet the requirements of capture?"""

# ruff: noqa: S608 - names in statements are quoted, values are parameters

from __future__ import annotations

import os

from deltaforge_dagster.sources.findings import Finding, absent_tables, finding_errors, listed
from deltaforge_dagster.sources.rows.columns import ColumnRules
from deltaforge_dagster.sources.turso import native, triggers
from deltaforge_dagster.sources.turso.connection import TursoSession, identifier
from deltaforge_dagster.sources.turso.mode import Way, Ways
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.schema import Definition, captured
from deltaforge_dagster.sources.turso.source_type import (
    DatabaseFile,
    DatabaseServer,
    TursoSourceConfig,
)

_SECONDS = 20.0
_MANY_CHANGES = 1_000_000


def preflight(
    way: Way,
    ways: Ways,
    config: TursoSourceConfig,
    rules: ColumnRules,
    position: TursoPosition | None,
) -> list[Finding]:
    """Return the findings, without changing anything; takes at most 30 seconds.

    Args:
        way: The mode, with its database.
        ways: All modes of the database.
        config: The source's configuration.
        rules: The column rules.
        position: The captured position; None before the first run.

    Raises:
        DeltaforgeError: The database cannot be reached.
    """
    findings: list[Finding] = []
    with way.database.session(_SECONDS) as session:
        tables = captured(session, ways.captures)
        full_names = {definition.table.full_name for definition in tables.values()}
        findings.append(Finding("mode", "ok", f"changes are found by mode {way.mode}"))
        findings.append(_tables(tables, config))
        findings += ways.patterns.unmatched(
            [
                (definition.table.schema or definition.table.db, definition.table.table)
                for definition in tables.values()
            ]
        )
        absent = sorted(
            f"{db}.{name}" for db, name in ways.patterns.exact if f"{db}.{name}" not in full_names
        )
        if absent:
            findings.append(absent_tables(absent))
        keyless = [name for name, definition in tables.items() if not definition.table.primary_key]
        if keyless:
            text = f"no PRIMARY KEY: {listed(keyless)}; events have no key, and order is by event"
            findings.append(Finding("keys", "note", text))
        computed = [name for name, definition in tables.items() if definition.computed]
        if computed:
            findings.append(_computed(computed, way.mode))
        findings += _mode_findings(session, way, tables, config, position)
    if rules:
        named = {definition.table.full_name: definition.table for definition in tables.values()}
        findings += rules.findings(named, named.__getitem__)
    return findings


def _mode_findings(
    session: TursoSession,
    way: Way,
    tables: dict[str, Definition],
    config: TursoSourceConfig,
    position: TursoPosition | None,
) -> list[Finding]:
    findings: list[Finding] = []
    if way.mode == triggers.MODE and config.auto_create_triggers:
        if not triggers.is_complete(session, tables):
            return [_missing_triggers(config.place)]
    elif way.mode == triggers.MODE:
        findings += _triggers(session, tables)
    with finding_errors("changes", findings):
        way.log.newest(session) if position is None else way.log.check(session, position)
        findings.append(Finding("changes", "ok", "everything after the captured position is there"))
    if way.mode == native.MODE:
        findings += _native(session, config)
    elif way.mode != triggers.MODE:
        text = "updates and deletes are not seen, only rows with a larger rowid than before"
        findings.append(Finding("polling", "warning", text))
    return findings


def _missing_triggers(location: DatabaseFile | DatabaseServer) -> Finding:
    """Return a finding about whether the next start can create change table and triggers."""
    text = "the table of changes, or triggers, are missing or old; the next start makes them"
    if isinstance(location, DatabaseServer):
        text += "; whether auth_token allows it only that shows"
        return Finding("triggers", "note", text)
    closed = [
        path for path in (location.path, location.path.parent) if not os.access(path, os.W_OK)
    ]
    if not closed:
        return Finding("triggers", "note", text)
    text = (
        f"triggers have to be made, but user {os.geteuid()} may not write"
        f" {listed(list(map(str, closed)))}"
    )
    return Finding("triggers", "error", text, f"chown {os.geteuid()} {closed[0]}")


def _tables(tables: dict[str, Definition], config: TursoSourceConfig) -> Finding:
    if not tables:
        patterns = listed(config.tables) or "*"
        return Finding("tables", "warning", f"no table matches source.config.tables ({patterns})")
    return Finding("tables", "ok", f"{len(tables)} captured: {listed(sorted(tables))}")


def _computed(names: list[str], mode: str) -> Finding:
    text = f"tables with computed columns: {listed(names)}; "
    if mode == native.MODE:
        return Finding("columns", "warning", f"{text}their changes are held back in mode native")
    return Finding("columns", "note", f"{text}events leave these columns out")


def _triggers(session: TursoSession, tables: dict[str, Definition]) -> list[Finding]:
    remedy = "set source.config.auto_create_triggers: true"
    missing = sorted(tables.keys() - triggers.triggered(session))
    if missing:
        text = (
            "without triggers for every INSERT, UPDATE and DELETE, so that changes are not found: "
            f"{listed(missing)}"
        )
        return [Finding("triggers", "error", text, remedy)]
    old = sorted(triggers.outdated(session, tables))
    if old:
        text = (
            "tables with triggers of an earlier version, or made before columns were added:"
            f" {listed(old)}; events lack such columns, and the last digit of REAL values above"
            " 1e100 may be another one"
        )
        return [Finding("triggers", "warning", text, remedy)]
    return [Finding("triggers", "ok", "every captured table has triggers")]


def _native(session: TursoSession, config: TursoSourceConfig) -> list[Finding]:
    findings = [
        Finding(
            "capture",
            "note",
            "only connections that ran PRAGMA unstable_capture_data_changes_conn are captured",
        )
    ]
    if isinstance(config.place, DatabaseFile):
        text = (
            "Turso lets one process open a file at a time: the application must close it now and"
            " then"
        )
        findings.append(Finding("lock", "note", text))
    table = identifier(config.cdc_table_name)
    rows = session.query(f"SELECT max(change_id) - min(change_id) FROM {table}")
    kept = rows[0][0] if rows else None
    if isinstance(kept, int) and kept > _MANY_CHANGES:
        text = f"{kept:,} changes are kept; delete those before the last one that was captured"
        findings.append(Finding("size", "note", text))
    return findings
