"""Inspect a MySQL server before and between runs: does it meet the requirements of capture?

It only queries the server and changes nothing. Errors that would stop a run come from the functions
that the run itself uses; this module adds the checks that a run does not make.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pymysql

from deltaforge_dagster.sources.findings import (
    Finding,
    Level,
    absent_tables,
    finding_errors,
    listed,
    retention_level,
)
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession, MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import log_retention, status
from deltaforge_dagster.sources.mysql.connection.service import (
    MysqlService,
    SettingChange,
    service_of,
)
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.catalog import SYSTEM_DATABASES
from deltaforge_dagster.sources.mysql.snapshot.selected import quoted
from deltaforge_dagster.sources.mysql.source_type import server_id
from deltaforge_dagster.sources.mysql.stream.dump import check_rights
from deltaforge_dagster.sources.outbox import MysqlOutboxTables
from deltaforge_dagster.sources.tables import TablePatterns

_SECONDS = 30.0
_RECOMMENDED = {
    "binlog_row_image": (
        "FULL",
        (
            "updates and deletes carry only a part of the old row, and inserts lack columns that"
            " have their defaults"
        ),
    ),
    "binlog_row_metadata": (
        "FULL",
        (
            "tables get their columns' names from the catalog, and from the statements in the log"
            " that change them"
        ),
    ),
    "gtid_mode": ("ON", "after a failover the position means nothing on the new server"),
}
"""Recommended values of variables, and the consequence of any other value."""

_FRAGMENTS = "binlog_row_event_fragment_threshold"

_KEPT_ROWS = (
    "tables get these where they are constants, and are held where they are not; after REPLACE,"
    " MariaDB logs an update without the columns that got their defaults, so that tables keep the"
    " old values"
)
"""What `binlog_row_image` other than FULL means for sinks that keep the rows of tables."""

_HOUR, _DAY = 3600, 86_400
_DENIED = (1044, 1142)  # ER_DBACCESS_DENIED_ERROR, ER_TABLEACCESS_DENIED_ERROR
_NO_TABLE = "deltaforge_no_such_table"


def preflight(
    server: MysqlSourceServer,
    patterns: TablePatterns,
    source_id: str,
    position: BinlogPosition | None,
    as_of: float | None,
    *,
    outboxes: MysqlOutboxTables,
    snapshot: bool,
    keeps_rows: bool,
) -> list[Finding]:
    """Return the findings, in the order in which problems have to be fixed.

    Args:
        server: The server.
        patterns: The tables to capture.
        source_id: Id of the source, from which our replication server id is derived.
        position: The captured position; None before the first run.
        as_of: When the newest captured change was made, in seconds since 1970.
        outboxes: Which tables are outboxes.
        snapshot: Whether snapshots of the other tables will be read, too.
        keeps_rows: Whether a sink keeps the rows of tables.

    Raises:
        DeltaforgeError: The server cannot be reached.
    """
    with server.query(_SECONDS) as session:
        service, version = service_of(session), session.server_version
    by = f", {service.name}" if service.name else ""
    findings = [Finding("connection", "ok", f"{server.where}{by}, version {version}")]
    # Each step has its own session, because an error closes the session in which it occurs.
    with finding_errors("log settings", findings), server.query(_SECONDS) as session:
        findings += _settings(session, server, service, source_id, keeps_rows=keeps_rows)
    with finding_errors("grants", findings):
        check_rights(server, server_id(source_id, "rights"), _SECONDS)
        text = f"user {server.user!r} may read the binary log"
        findings.append(Finding("grants", "ok", text))
    with finding_errors("position", findings), server.query(_SECONDS) as session:
        findings += _position(session, server, service, position, as_of)
    with finding_errors("tables", findings), server.query(_SECONDS) as session:
        findings += _tables(session, server, patterns, outboxes, snapshot=snapshot)
    return findings


def _settings(
    session: MysqlSession,
    server: MysqlSourceServer,
    service: MysqlService,
    source_id: str,
    *,
    keeps_rows: bool,
) -> list[Finding]:
    server_log.facts(session, server.where)
    findings = [Finding("log settings", "ok", "the binary log can be read")]
    asked = (*_RECOMMENDED, "binlog_row_value_options", "server_id", _FRAGMENTS)
    settings = _variables(session, asked)
    for name, (wanted, meaning) in _RECOMMENDED.items():
        value = settings.get(name)
        if value is None or value.upper() == wanted:
            continue
        level: Level = "note"
        change = service.change(session, name, wanted)
        if name == "gtid_mode":
            change = SettingChange(f"; {service.gtids_on}")
            level = "warning" if service.moves else level
        if keeps_rows and name == "binlog_row_image":
            level, meaning = "warning", f"{meaning}; {_KEPT_ROWS}"  # noqa: PLW2901 - more of it
        text = f"{name} is {value}: {meaning}{change.advice}"
        findings.append(Finding(name, level, text, change.remedy))
    partial = settings.get("binlog_row_value_options", "")
    image = settings.get("binlog_row_image", "FULL").upper()
    if "PARTIAL_JSON" in partial.upper() and image != "FULL":
        change = service.change(session, "binlog_row_image", "FULL")
        text = (
            f"binlog_row_value_options is {partial}, and binlog_row_image is {image}: an update of"
            " a JSON column is logged as what it changed in a document that the log does not have,"
            f" which stops the pipeline{change.advice}"
        )
        findings.append(Finding("binlog_row_value_options", "error", text, change.remedy))
    if _FRAGMENTS in settings:
        text = (
            f"{_FRAGMENTS} is {settings[_FRAGMENTS]}: changes of more bytes at once are logged in"
            " fragments, which this version does not join: such a change stops the pipeline"
        )
        findings.append(Finding(_FRAGMENTS, "note", text))
    if settings.get("server_id") == str(server_id(source_id)):
        findings.append(
            Finding(
                "server id",
                "error",
                f"the server has the id {server_id(source_id)}, which is made from source id "
                f"{source_id!r}: give the source another id, or the server another server_id",
            )
        )
    return findings


def _position(
    session: MysqlSession,
    server: MysqlSourceServer,
    service: MysqlService,
    position: BinlogPosition | None,
    as_of: float | None,
) -> list[Finding]:
    facts = server_log.facts(session, server.where)
    head = server_log.tail(session, server.where, gtids=facts.gtids)
    if position is None:
        text = f"capture would begin at {head.file}, {head.pos}"
    else:
        server_log.check_log_kept(session, server.where, position, facts)
        text = "the log still has what follows the position"
    behind = position is not None and position < head
    lag = time.time() - as_of if behind and as_of else 0.0
    return [Finding("position", "ok", text), _retention(session, service, lag)]


def _retention(session: MysqlSession, service: MysqlService, lag: float) -> Finding:
    retention = log_retention(session, service)
    unsafe, seconds = retention.unsafe(session), retention.seconds
    if unsafe is not None:
        return unsafe
    assert seconds is not None
    if seconds == math.inf:
        return Finding("retention", "ok", "the server never removes log files by age")
    change = retention.longer(session)
    used = lag / seconds
    level = retention_level(used)
    text = f"log files are removed after {seconds / _HOUR:g} hours"
    if lag:
        text += f"; the newest captured change is {lag / _HOUR:.1f} hours old ({used:.0%} of that)"
    if level == "ok" and seconds < _DAY:
        level, text = "warning", f"{text}: a pipeline that stands still for longer loses its place"
    if level == "ok":
        return Finding("retention", "ok", text)
    return Finding("retention", level, f"{text}{change.advice}", change.remedy)


def _tables(
    session: MysqlSession,
    server: MysqlSourceServer,
    patterns: TablePatterns,
    outboxes: MysqlOutboxTables,
    *,
    snapshot: bool,
) -> list[Finding]:
    rows = session.rows(
        "SELECT t.TABLE_SCHEMA AS db, t.TABLE_NAME AS name,"
        " EXISTS (SELECT 1 FROM information_schema.STATISTICS s"
        " WHERE s.TABLE_SCHEMA = t.TABLE_SCHEMA AND s.TABLE_NAME = t.TABLE_NAME"
        " AND s.INDEX_NAME = 'PRIMARY') AS has_key"
        " FROM information_schema.TABLES t WHERE t.TABLE_TYPE = 'BASE TABLE'"
        " AND t.TABLE_SCHEMA NOT IN (%s, %s, %s, %s) ORDER BY 1, 2",
        *SYSTEM_DATABASES,
    )
    captured = {
        (row["db"], row["name"]): bool(row["has_key"])
        for row in rows
        if patterns.matches(row["db"], row["name"])
    }
    findings = coverage(session, server, patterns)
    if captured:
        count = Finding("tables", "ok", f"{len(captured)} match source.config.tables")
    else:
        text = f"no table matches source.config.tables ({patterns})"
        count = Finding("tables", "warning", text)
    findings += [count, *patterns.unmatched(captured)]
    if outboxes and not any(outboxes.has(*name) for name in captured):
        text = "no captured table matches source.config.outbox.tables: nothing comes from an outbox"
        findings.append(Finding("outbox", "warning", text))
    read = [name for name in captured if not outboxes.has(*name)]  # a snapshot leaves outboxes out
    findings += _reading(session, server, read, snapshot=snapshot)
    if snapshot:
        findings += _locking(session, server, read)
    without = [name for name, has_key in captured.items() if not has_key]
    if without:
        findings.append(
            Finding(
                "keys",
                "note",
                f"no primary key: {listed(_full_names(without))}; their messages have no key of the"
                " row, so sinks cannot keep one row's changes in order or compact them",
                [
                    f"ALTER TABLE {quoted(db)}.{quoted(table)} ADD PRIMARY KEY (...)"
                    for db, table in without
                ],
            )
        )
    return findings


def _reading(
    session: MysqlSession,
    server: MysqlSourceServer,
    tables: Sequence[tuple[str, str]],
    *,
    snapshot: bool,
) -> list[Finding]:
    unreadable = [name for name in tables if not _readable(session, *name)]
    if not unreadable:
        return []
    text = f"user {server.user!r} may not read {listed(_full_names(unreadable))}"
    account = session.account
    grants = [
        f"GRANT SELECT ON {quoted(db)}.{quoted(table)} TO {account}" for db, table in unreadable
    ]
    if snapshot:
        return [Finding("grants", "error", f"{text}, which the snapshot needs", grants)]
    text += (
        ": the stream works, names of columns (without binlog_row_metadata = FULL) and snapshots"
        " do not"
    )
    return [Finding("grants", "note", text, grants)]


def _locking(
    session: MysqlSession, server: MysqlSourceServer, tables: Sequence[tuple[str, str]]
) -> list[Finding]:
    """Check the privilege to lock tables, which a snapshot needs on a MySQL server without GTIDs.

    The check locks nothing: it tries to lock a table that does not exist, and the server checks the
    privilege first.
    """
    if session.is_mariadb or server_log.facts(session, server.where).gtids:
        return []
    refused = [
        db
        for db in sorted({db for db, _ in tables})
        if session.refusal(f"LOCK TABLES {quoted(db)}.{quoted(_NO_TABLE)} READ") in _DENIED
    ]
    if not refused:
        return []
    account = session.account
    return [
        Finding(
            "grants",
            "warning",
            f"user {server.user!r} may not lock tables in {listed(refused)}, as far as can be "
            "told without locking one; a snapshot of a server without GTIDs does so",
            [f"GRANT LOCK TABLES, SELECT ON {quoted(db)}.* TO {account}" for db in refused],
        )
    ]


def _readable(session: MysqlSession, db: str, table: str) -> bool:
    try:
        session.rows(f"SELECT 1 FROM {quoted(db)}.{quoted(table)} LIMIT 0")  # noqa: S608 - quoted
    except pymysql.MySQLError:
        return False
    return True


def _variables(session: MysqlSession, names: Sequence[str]) -> Mapping[str, str]:
    wanted = ", ".join(f"'{name}'" for name in names)
    rows = session.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({wanted})")
    return {row["Variable_name"]: str(row["Value"]) for row in rows}


def _full_names(names: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{db}.{table}" for db, table in names]


_NO_SUCH_TABLE, _NO_SUCH_DATABASE = 1146, 1049
_MAX_TABLES = 10_000
_MAX_NAMES = 20


def coverage(
    session: MysqlSession, server: MysqlSourceServer, patterns: TablePatterns
) -> list[Finding]:
    """Return findings for databases and tables that the patterns name but that are not captured.

    The server may exclude whole databases from its log (manual: "Binary Log Options",
    `--binlog-do-db` and `--binlog-ignore-db`; with row format, the table's database decides). A
    table that a pattern names may not exist, because it was dropped, renamed, or moved to another
    database.

    Raises:
        DeltaforgeError: The server cannot be reached.
    """
    return [*_filtered(session, patterns), *_absent(session, server, patterns)]


def _filtered(session: MysqlSession, patterns: TablePatterns) -> list[Finding]:
    row = status(session) or {}
    wanted, ignored = _names(row, "Binlog_Do_DB"), _names(row, "Binlog_Ignore_DB")
    if not wanted and not ignored:
        return []
    named = {first.text for first, _ in patterns.parts if not first.prefix}
    rows = session.rows(
        "SELECT DISTINCT TABLE_SCHEMA AS db, TABLE_NAME AS name FROM information_schema.TABLES"
        " WHERE TABLE_TYPE = 'BASE TABLE' LIMIT %s",
        _MAX_TABLES,
    )
    seen = {str(row["db"]) for row in rows if patterns.matches(str(row["db"]), str(row["name"]))}
    left_out = sorted(
        name for name in named | seen if (name not in wanted if wanted else name in ignored)
    )
    if not left_out:
        return []
    option = "binlog-do-db" if wanted else "binlog-ignore-db"
    return [
        Finding(
            "binlog filter",
            "error",
            "not captured, because the server leaves these databases out of its binary log "
            f"({option}): {listed(left_out)}",
            f"change {option} in the server's configuration file, and restart the server",
        )
    ]


def _absent(
    session: MysqlSession, server: MysqlSourceServer, patterns: TablePatterns
) -> list[Finding]:
    """Return findings for tables in the patterns that do not exist or the user may not see."""
    gone, not_visible = [], []
    for db, table in _invisible(session, patterns.exact):
        refused = session.refusal(
            f"SELECT 1 FROM {quoted(db)}.{quoted(table)} LIMIT 0"  # noqa: S608 - quoted
        )
        if refused in (_NO_SUCH_TABLE, _NO_SUCH_DATABASE):
            gone.append(f"{db}.{table}")
        elif refused is not None:
            not_visible.append(f"{db}.{table}")
    findings = []
    if gone:
        findings.append(absent_tables(gone))
    if not_visible:
        findings.append(
            Finding(
                "tables",
                "warning",
                f"not there, or not for user {server.user!r} to see: {listed(not_visible)}",
                f"GRANT SELECT ON *.* TO {session.account}",
            )
        )
    return findings


def _invisible(session: MysqlSession, names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the tables that the catalog does not show to our user, at most 20."""
    if not names:
        return []
    placeholders = ", ".join(["(%s, %s)"] * len(names))
    # Nothing but placeholders is formatted into the statement.
    rows = session.rows(
        "SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name FROM information_schema.TABLES"  # noqa: S608
        f" WHERE (TABLE_SCHEMA, TABLE_NAME) IN ({placeholders})",
        *(part for name in names for part in name),
    )
    shown = {(str(row["db"]), str(row["name"])) for row in rows}
    return [name for name in names if name not in shown][:_MAX_NAMES]


def _names(row: Mapping[str, Any], column: str) -> set[str]:
    return {name.strip() for name in str(row.get(column) or "").split(",") if name.strip()}
