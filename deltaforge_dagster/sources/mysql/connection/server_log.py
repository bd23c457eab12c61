"""Query the server about its binary log: settings, end, whether a position is available, retention.

Manual: "Binary Logging Options and Variables", "SHOW BINARY LOG STATUS" (before MySQL 8.2: "SHOW
MASTER STATUS"), "SHOW BINARY LOGS". MariaDB's manual: "Global Transaction ID", "BINLOG_GTID_POS".

MySQL and MariaDB remove files of the log by their age (`binlog_expire_logs_seconds`, before that
`expire_logs_days`); without either they keep them for ever. Amazon's services ignore both: they
remove a file as soon as they do not need it themselves, unless `mysql.rds_configuration` names a
number of hours. Azure removes files at once without the variable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltaforge_dagster.errors import PositionLost, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.mysql.connection.refusals import PRIVILEGE_MISSING, SYNTAX, lost
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.connection.service import (
    MysqlService,
    SettingChange,
    recognize,
    service_of,
)
from deltaforge_dagster.sources.mysql.position import BinlogPosition, DomainGtids, GtidSet, covers

_OLDEST, _OLDEST_MARIADB = (5, 7), (10, 5)  # the oldest that are tested (docs/mysql.md)

_VARIABLES = (
    "log_bin",
    "binlog_format",
    "gtid_mode",
    "binlog_storage_engine",
    "aurora_version",
    "innodb_read_only",
)

FILE_START = 4
"""Offset of the first event of a file, after the magic number."""

_NO_ENGINE = ("", "NONE")
_EXECUTED_SECONDS = 5.0
_COMMAND_FAILED = 1220  # ER_ERROR_WHEN_EXECUTING_COMMAND


@dataclass(frozen=True, slots=True)
class BinlogSettings:
    """The server's settings that decide how its log is read.

    Attributes:
        gtids: Whether every transaction has a GTID, so that reading can start from a GTID set.
    """

    gtids: bool


def facts(session: MysqlSession, where: str) -> BinlogSettings:
    """Check the server's version and settings, and return the settings that matter for reading.

    Raises:
        SourceMisconfigured: The version is too old, a setting is wrong, or the service gives no
            client access to its log; the message says how to change it.
        SourceUnavailable: The log is on another server of the cluster.
    """
    if session.version < (_OLDEST_MARIADB if session.is_mariadb else _OLDEST):
        raise SourceMisconfigured(
            f"{where}: version {session.server_version} is too old; needed is MySQL 5.7 or later,"
            " or MariaDB 10.5 or later"
        )
    by_name = recognize(session.server_version, {}, session.host)
    if by_name.no_log:
        raise SourceMisconfigured(f"{where}: {by_name.name}: {by_name.no_log}")
    names = ", ".join(f"'{name}'" for name in _VARIABLES)
    values = {
        row["Variable_name"]: str(row["Value"])
        for row in session.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    }
    _check_readable(session, where, values)
    if session.is_mariadb:
        return BinlogSettings(gtids=True)
    return BinlogSettings(gtids=values.get("gtid_mode", "OFF").upper() == "ON")


def _check_readable(session: MysqlSession, where: str, values: Mapping[str, str]) -> None:
    """Check the variables on which reading the log depends.

    Raises:
        SourceUnavailable: This server of an Aurora cluster has no log, but another one has.
        SourceMisconfigured: A value is wrong; the message says how to change it.
    """
    if "aurora_version" in values and values.get("innodb_read_only", "").upper() == "ON":
        # The cluster's name may lead here for a while after a failover.
        raise SourceUnavailable(
            f"{where}: this is a reader of an Amazon Aurora cluster, which has no binary log;"
            " after a failover that passes, otherwise let the DSN name the cluster's writer"
            " endpoint"
        )
    if values.get("log_bin", "ON").upper() != "ON":
        raise _log_off(session, where)
    form = values.get("binlog_format", "ROW")
    if form.upper() != "ROW":
        change = service_of(session).change(session, "binlog_format", "ROW")
        raise SourceMisconfigured(
            f"{where}: binlog_format is {form}{change.sentence}, and reconnect what writes"
        )
    engine = values.get("binlog_storage_engine", "")
    if engine.upper() not in _NO_ENGINE:
        raise SourceMisconfigured(
            f"{where}: binlog_storage_engine is {engine}: this version does not read the binary"
            f" log that MariaDB keeps inside of {engine}; start the server without"
            " binlog_storage_engine"
        )


def _log_off(session: MysqlSession, where: str) -> SourceMisconfigured:
    return SourceMisconfigured(f"{where}: log_bin is OFF; {service_of(session).log_off}")


def tail(session: MysqlSession, where: str, *, gtids: bool) -> BinlogPosition:
    """Return the log's current end: file, offset and, with `gtids`, the executed GTID set.

    With GTIDs, the set is the exact position, and file and offset are approximate: on a busy server
    the log grows between the two queries.
    """
    head = status(session)
    if head is None:
        raise _log_off(session, where)
    gtid_set = executed(session) if gtids else None
    return BinlogPosition(str(head["File"]), int(head["Position"]), gtid_set)


def status(session: MysqlSession) -> dict[str, Any] | None:
    """Return the row of `SHOW BINARY LOG STATUS`; None without a log.

    It has the newest file, where that ends, and the database filters.
    """
    rows = session.rows_or_refusal("SHOW BINARY LOG STATUS", SYNTAX)
    if rows is None:  # before MySQL 8.2
        rows = session.rows("SHOW MASTER STATUS")
    return rows[0] if rows else None


def executed(session: MysqlSession) -> str:
    """Return the GTID set that the server has executed; on MariaDB each domain's last GTID."""
    if session.is_mariadb:
        return str(DomainGtids.parse(_global(session, "gtid_binlog_pos")))
    return str(GtidSet.parse(_global(session, "gtid_executed")))


def _purged(session: MysqlSession) -> str:
    """Return the GTIDs of transactions that were purged from the log."""
    if session.is_mariadb:
        oldest = next(iter(log_files(session)))
        return str(_domains_before(session, oldest, FILE_START) or DomainGtids())
    return str(GtidSet.parse(_global(session, "gtid_purged")))


def domains_at(session: MysqlSession, where: str, position: BinlogPosition) -> DomainGtids:
    """Return MariaDB's last GTID of each domain before an offset of a file.

    Raises:
        PositionLost: The log does not have the file.
    """
    domains = _domains_before(session, position.file, position.pos)
    if domains is None:
        raise lost(where, f"the binary log file {position.file} was purged")
    return domains


def _domains_before(session: MysqlSession, file: str, pos: int) -> DomainGtids | None:
    value = session.rows("SELECT BINLOG_GTID_POS(%s, %s) AS value", file, pos)[0]["value"]
    return None if value is None else DomainGtids.parse(str(value))


def check_log_kept(
    session: MysqlSession, where: str, position: BinlogPosition, settings: BinlogSettings
) -> None:
    """Check that the log still has everything after `position`.

    Raises:
        PositionLost: It does not, or this is another server's log.
        SourceUnavailable: The server lacks transactions before `position`, and is not a primary, or
            not yet.
        SourceMisconfigured: The position is a GTID set, but GTIDs are switched off now.
    """
    if position.gtid_set is None:
        _check_file(session, where, position)
        return
    if not settings.gtids:
        raise SourceMisconfigured(
            f"{where}: gtid_mode is not ON, but the position is a GTID set; switch it on "
            'again, step by step (manual: "Enabling GTID Transactions Online")'
        )
    if not covers(position.gtid_set, _purged(session)):
        raise lost(where, "the binary log with the transactions after the position was purged")
    # The log shows a transaction a moment before the server counts it as executed.
    deadline = time.monotonic() + _EXECUTED_SECONDS
    while not covers(executed(session), position.gtid_set):
        if time.monotonic() > deadline:
            if may_catch_up(session):
                raise SourceUnavailable(
                    f"{where}: the server has not executed every transaction that was read before;"
                    " it is read-only or a replica, so it may not have caught up yet after a"
                    " failover, or another server is the primary: then let the DSN name that one"
                )
            raise lost(
                where,
                "the server has not executed every transaction that was read before; was it "
                "restored from a backup, or is it another server?",
            )
        time.sleep(0.1)
    if not session.is_mariadb:
        _check_anonymous(session, where, position)


def is_lost_here(
    session: MysqlSession, where: str, position: BinlogPosition, settings: BinlogSettings
) -> bool:
    """Return whether the log after `position` is missing, on a server that is no primary (yet).

    Such a server may be another one than the one that was read. This is for callers that do not
    know which server was read; a run knows it, and decides.

    Raises:
        PositionLost: The log after `position` is missing, and the server is a primary.
        DeltaforgeError: As from `check_log_kept`.
    """
    try:
        check_log_kept(session, where, position, settings)
    except PositionLost:
        if not may_catch_up(session):
            raise
        return True
    return False


def may_catch_up(session: MysqlSession) -> bool:
    """Return whether the server may still get what it lacks: it is read-only or a replica."""
    rows = session.rows("SHOW GLOBAL VARIABLES LIKE 'read_only'")
    if any(str(row["Value"]).upper() != "OFF" for row in rows):
        return True
    refusals = (SYNTAX, PRIVILEGE_MISSING)
    replica = session.rows_or_refusal("SHOW REPLICA STATUS", *refusals)
    if replica is None:  # before MySQL 8.0.22
        replica = session.rows_or_refusal("SHOW SLAVE STATUS", *refusals) or []
    applies = ("Replica_SQL_Running", "Slave_SQL_Running")
    return any(row.get(name) == "Yes" for row in replica for name in applies)


def log_files(session: MysqlSession) -> dict[str, int]:
    """Return the files of the log, oldest first, and their sizes in bytes."""
    return {row["Log_name"]: int(row["File_size"]) for row in session.rows("SHOW BINARY LOGS")}


def bytes_after(files: Mapping[str, int], position: BinlogPosition) -> int:
    """Return how many bytes of log follow a position, in files as `log_files` returns them."""
    later = [size for name, size in files.items() if position < BinlogPosition(name, 0)]
    return sum(later) + max(files.get(position.file, 0) - position.pos, 0)


def _check_anonymous(session: MysqlSession, where: str, position: BinlogPosition) -> None:
    """Check that the first transaction after the position has a GTID.

    To a reader that starts from a GTID set, the server sends the log from the newest file before
    which the reader has every GTID. It silently skips transactions without GTID in earlier files,
    which were logged while gtid_mode was not ON.
    """
    files = list(log_files(session))
    if position.file not in files:
        return  # the position was captured on another server, with other file names
    begin = f" FROM {position.pos:d}"
    for file in files[files.index(position.file) :]:
        query = f"SHOW BINLOG EVENTS IN '{file}'{begin} LIMIT 10"
        for row in session.rows_or_refusal(query, _COMMAND_FAILED) or ():
            if row["Event_type"] == "Anonymous_Gtid":
                raise lost(
                    where,
                    f"{file} has transactions without GTID after the position, since gtid_mode was "
                    "not ON for a while: the server does not send them to who reads by GTIDs",
                )
            if row["Event_type"].startswith("Gtid"):
                return
        begin = ""


def _check_file(session: MysqlSession, where: str, position: BinlogPosition) -> None:
    sizes = log_files(session)
    if position.file not in sizes:
        raise lost(where, f"the binary log file {position.file} was purged")
    if position.pos > sizes[position.file]:
        raise lost(
            where,
            f"the binary log file {position.file} ends before position {position.pos}; was the "
            "server restored from a backup, or did it crash with sync_binlog = 0?",
        )


def _global(session: MysqlSession, name: str) -> str:
    value = session.rows(f"SELECT @@GLOBAL.{name} AS value")[0]["value"]
    return "" if value is None else str(value)


_RETENTION = ("binlog_expire_logs_seconds", "expire_logs_days")

_HOUR, _DAY = 3600, 86_400
_WEEK = 7 * _DAY
_RDS_HOURS = "SELECT value FROM mysql.rds_configuration WHERE name = 'binlog retention hours'"

_HIDDEN = (1044, 1142, 1146)
"""Error numbers of a table that we may not see, or that is not there."""


@dataclass(frozen=True, slots=True)
class LogRetention:
    """How long a server keeps files of its binary log.

    Attributes:
        seconds: Their age when they are removed; infinite if they never are; 0 if they are removed
            as soon as the server does not need them itself; None if that is not known.
        service: Who runs the server.
    """

    seconds: float | None
    service: MysqlService

    @property
    def setting(self) -> str:
        """The name of the setting that decides how long the log is kept."""
        return "binlog retention hours" if self.service.most_hours else _RETENTION[0]

    def longer(self, session: MysqlSession) -> SettingChange:
        """Return the change that keeps the log for twice as long as now, at least for a week."""
        seconds = self.seconds
        wanted = max(_WEEK, 2 * round(seconds)) if seconds and math.isfinite(seconds) else _WEEK
        if not self.service.most_hours:
            return self.service.change(session, _RETENTION[0], wanted)
        if seconds is None:
            return SettingChange(
                "", f"GRANT SELECT ON mysql.rds_configuration TO {session.account}"
            )
        hours = min(wanted // _HOUR, self.service.most_hours)
        if seconds >= hours * _HOUR:
            return SettingChange(f"; {self.service.name} keeps it no longer")
        return SettingChange(
            "", f"CALL mysql.rds_set_configuration('binlog retention hours', {hours})"
        )

    def unsafe(self, session: MysqlSession) -> Finding | None:
        """Return a finding if log files may be removed any time; None if they are kept a while."""
        if self.seconds:
            return None
        change = self.longer(session)
        if self.seconds is None:
            text = (
                f"how long {self.service.name} keeps log files is not known, because the user may"
                " not read mysql.rds_configuration; without `binlog retention hours` they are"
                " removed as soon as possible"
            )
            return Finding("retention", "warning", text, change.remedy)
        text = (
            f"{self.service.name} removes log files as soon as it does not need them itself,"
            f" whether they were captured or not{change.advice}"
        )
        return Finding("retention", "error", text, change.remedy)


def log_retention(session: MysqlSession, service: MysqlService) -> LogRetention:
    """Ask a server how long it keeps its binary log."""
    if service.most_hours:
        return LogRetention(_rds_seconds(session), service)
    wanted = ", ".join(f"'{name}'" for name in _RETENTION)
    rows = session.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({wanted})")
    values = {row["Variable_name"]: float(row["Value"]) for row in rows}
    seconds = values.get(_RETENTION[0], 0) or round(values.get(_RETENTION[1], 0) * _DAY)
    unset = math.inf if service.unset_keeps else 0.0
    return LogRetention(seconds or unset, service)


def _rds_seconds(session: MysqlSession) -> float | None:
    """Return for how many seconds Amazon's services keep the log; None if we may not see it."""
    rows = session.rows_or_refusal(_RDS_HOURS, *_HIDDEN)
    if rows is None:
        return None
    hours = rows[0]["value"] if rows else None
    return 0.0 if hours is None else float(hours) * _HOUR
