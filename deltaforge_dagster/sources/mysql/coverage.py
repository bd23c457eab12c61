"""Which of the tables that a pipeline asks for never come with the binary log.

The server may leave whole databases out of its log (manual: "Binary Log Options", `--binlog-do-db` and
`--binlog-ignore-db`; with rows in the log, the database of the table decides). A table that a pattern
names may not exist: it was dropped, or renamed, or moved to another database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deltaforge_dagster.sources.findings import Finding, listed
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession, MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import status
from deltaforge_dagster.sources.mysql.snapshot.selected import quoted
from deltaforge_dagster.sources.tables import TablePatterns

_NO_SUCH_TABLE, _NO_SUCH_DATABASE = 1146, 1049
_MOST = 10_000
_FEW = 20


def coverage(
    session: MysqlSession, server: MysqlSourceServer, patterns: TablePatterns
) -> list[Finding]:
    """Return the databases and tables that are not captured although the patterns ask for them.

    Raises:
        DeltaforgeError: The server cannot be asked.
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
        _MOST,
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
            f"not captured, because the server leaves these databases out of its binary log ({option}): "
            f"{listed(left_out)}",
            f"change {option} in the server's configuration file, and restart the server",
        )
    ]


def _absent(
    session: MysqlSession, server: MysqlSourceServer, patterns: TablePatterns
) -> list[Finding]:
    """Return the tables that are named and not there; without a right to see them nobody can tell."""
    gone, not_visible = [], []
    for db, table in _invisible(session, patterns.exact):
        refused = session.refusal(f"SELECT 1 FROM {quoted(db)}.{quoted(table)} LIMIT 0")  # noqa: S608 - quoted
        if refused in (_NO_SUCH_TABLE, _NO_SUCH_DATABASE):
            gone.append(f"{db}.{table}")
        elif refused is not None:
            not_visible.append(f"{db}.{table}")
    found = []
    if gone:
        found.append(
            Finding(
                "tables",
                "error",
                f"not captured, because no such table is there: {listed(gone)}",
            )
        )
    if not_visible:
        found.append(
            Finding(
                "tables",
                "warning",
                f"not there, or not for user {server.user!r} to see: {listed(not_visible)}",
                f"GRANT SELECT ON *.* TO '{server.user}'@'...'",
            )
        )
    return found


def _invisible(session: MysqlSession, names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the tables that the server's catalog does not show us, a few of them at most."""
    if not names:
        return []
    places = ", ".join(["(%s, %s)"] * len(names))
    rows = session.rows(
        "SELECT TABLE_SCHEMA AS db, TABLE_NAME AS name FROM information_schema.TABLES"  # noqa: S608 - places
        f" WHERE (TABLE_SCHEMA, TABLE_NAME) IN ({places})",
        *(part for name in names for part in name),
    )
    shown = {(str(row["db"]), str(row["name"])) for row in rows}
    return [name for name in names if name not in shown][:_FEW]


def _names(row: Mapping[str, Any], column: str) -> set[str]:
    return {name.strip() for name in str(row.get(column) or "").split(",") if name.strip()}
