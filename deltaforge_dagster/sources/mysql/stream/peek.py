"""Check, while no run reads, whether the log has anything that is worth a run; called often."""

from __future__ import annotations

import time

from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_ids import server_id
from deltaforge_dagster.sources.mysql.events import binlog
from deltaforge_dagster.sources.mysql.events.nested_events import events, payload_blocks
from deltaforge_dagster.sources.mysql.events.statements import WORTH_A_RUN, statement
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.stream.log_scan import LogScan, table_of
from deltaforge_dagster.sources.tables import TablePatterns

MAX_UNREAD_BYTES = 64 << 20
"""If there is more log than this, a run is worthwhile whatever the log contains."""

_HEAD_SECONDS = 2.0
_PEEK_SECONDS = 2.5


def has_changes(
    server: MysqlSourceServer, patterns: TablePatterns, source_id: str, start: BinlogPosition
) -> bool:
    """Return whether the log after `start` is worth a run; see `source.MysqlSource.has_changes`.

    Raises:
        PositionLost: The log after `start` is no longer available.
    """
    with server.query(_HEAD_SECONDS) as session:
        settings = server_log.facts(session, server.where)
        if server_log.is_lost_here(session, server.where, start, settings):
            return True  # a run knows whether this is the server that was read
        head = server_log.tail(session, server.where, gtids=settings.gtids)
    if not _has_grown(head, start):
        return False
    deadline = time.monotonic() + _PEEK_SECONDS
    with LogScan(server, start, server_id(source_id, "peek"), _PEEK_SECONDS) as scan:
        for event in scan:
            if scan.log_bytes > MAX_UNREAD_BYTES or time.monotonic() > deadline:
                return True
            if event is not None and _concerns(event.event, scan.server, patterns):
                return True
    return False


def _has_grown(head: BinlogPosition, start: BinlogPosition) -> bool:
    """Return whether the log has grown since `start`."""
    if start.gtid_set is not None:
        return head.gtid_set != start.gtid_set
    return head != start


def _concerns(event: bytes, server: binlog.LogServer, patterns: TablePatterns) -> bool:
    """Return whether an event is worth a run: a captured table, or a statement that matters."""
    kind, body = event[4:5], event[binlog.HEADER :]
    match kind[0] if kind else -1:
        case binlog.TABLE_MAP:
            return patterns.matches(*table_of(body))
        case binlog.QUERY:
            return statement(binlog.parse_query(body, server)).kind in WORTH_A_RUN
        case binlog.TRANSACTION_PAYLOAD:
            blocks = payload_blocks(body)
            return any(_concerns(nested, server, patterns) for nested in events(blocks))
        case _:
            return False
