"""Which of the tables that a pipeline asks for never come with the binary log.

The server may leave whole databases out of its log (manual: "Binary Log Options", `--binlog-do-db` and
`--binlog-ignore-db`; with rows in the log, the database of the table decides). A table that a pattern
names may not exist: it was dropped, or renamed, or moved to another database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltaforge_dagster.sources.findings import Finding, listed
from deltaforge_dagster.sources.mysql.connection import Server, Session
from deltaforge_dagster.sources.mysql.server_log import status
from deltaforge_dagster.sources.tables import TablePatterns

_NO_SUCH_TABLE, _NO_SUCH_DATABASE, _DENIED, _DATABASE_DENIED = 1146, 1049, 1142, 1044
_MOST = 1000


def coverage(session: Session, server: Server, patterns: TablePatterns) -> list[Finding]:
    """Return the databases and tables that are not captured although the patterns ask for them.

    Raises:
        DeltaforgeError: The server cannot be asked.
    """
    return [*_filtered(session, patterns), *_absent(session, server, patterns)]


def _filtered(session: Session, patterns: TablePatterns) -> list[Finding]:
    row = status(session) or {}
    wanted, ignored = _names(row, "Binlog_Do_DB"), _names(row, "Binlog_Ignore_DB")
    if not wanted and not ignored:
        return []
    databases = {first.text for first, _ in patterns.parts if not first.prefix}
    if any(first.prefix for first, _ in patterns.parts):
        rows = session.rows(
            "SELECT SCHEMA_NAME AS name FROM information_schema.SCHEMATA LIMIT %s", _MOST
        )
        databases |= {
            str(one["name"])
            for one in rows
            if any(first.matches(str(one["name"])) for first, _ in patterns.parts)
        }
    left_out = sorted(
        name
        for name in databases
        if not patterns.is_system(name) and (name not in wanted if wanted else name in ignored)
    )
    if not left_out:
        return []
    option = "binlog-do-db" if wanted else "binlog-ignore-db"
    return [
        Finding(
            "binlog filter",
            "error",
            f"not captured, because the server leaves these databases out of its binary log ({option}): "
            f"{listed(left_out)}",
            f"change {option} in the server's configuration file, and restart the server",
        )
    ]


def _absent(session: Session, server: Server, patterns: TablePatterns) -> list[Finding]:
    """Return the tables that are named and not there; without a right to see them nobody can tell."""
    gone, unseen = [], []
    for db, table in patterns.exact:
        refused = session.refusal(f"SELECT 1 FROM {_quoted(db)}.{_quoted(table)} LIMIT 0")  # noqa: S608 - quoted
        if refused in (_NO_SUCH_TABLE, _NO_SUCH_DATABASE):
            gone.append(f"{db}.{table}")
        elif refused in (_DENIED, _DATABASE_DENIED) and not _is_there(session, db, table):
            unseen.append(f"{db}.{table}")
    found = []
    if gone:
        found.append(
            Finding(
                "tables",
                "error",
                f"not captured, because no such table is there: {listed(gone)}",
            )
        )
    if unseen:
        found.append(
            Finding(
                "tables",
                "warning",
                f"not there, or not for user {server.user!r} to see: {listed(unseen)}",
                f"GRANT SELECT ON *.* TO '{server.user}'@'...'",
            )
        )
    return found


def _is_there(session: Session, db: str, table: str) -> bool:
    return bool(
        session.rows(
            "SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
            db,
            table,
        )
    )


def _names(row: Mapping[str, Any], column: str) -> set[str]:
    return {name.strip() for name in str(row.get(column) or "").split(",") if name.strip()}


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
