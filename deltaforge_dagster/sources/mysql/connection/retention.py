"""How long a server keeps its binary log, and how that is changed.

MySQL and MariaDB remove files by their age (`binlog_expire_logs_seconds`, before that
`expire_logs_days`); without either they keep them for ever. Amazon's services ignore both: they
remove a file as soon as they do not need it themselves, unless `mysql.rds_configuration` names a
number of hours. Azure removes files at once without the variable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.mysql.connection.server import MysqlSession
from deltaforge_dagster.sources.mysql.connection.service import MysqlService, SettingChange

_VARIABLES = ("binlog_expire_logs_seconds", "expire_logs_days")
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
        return "binlog retention hours" if self.service.most_hours else _VARIABLES[0]

    def longer(self, session: MysqlSession) -> SettingChange:
        """Return the change that keeps the log for twice as long as now, at least for a week."""
        seconds = self.seconds
        wanted = max(_WEEK, 2 * round(seconds)) if seconds and math.isfinite(seconds) else _WEEK
        if not self.service.most_hours:
            return self.service.change(session, _VARIABLES[0], wanted)
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
    wanted = ", ".join(f"'{name}'" for name in _VARIABLES)
    rows = session.rows(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({wanted})")
    values = {row["Variable_name"]: float(row["Value"]) for row in rows}
    seconds = values.get(_VARIABLES[0], 0) or round(values.get(_VARIABLES[1], 0) * _DAY)
    unset = math.inf if service.unset_keeps else 0.0
    return LogRetention(seconds or unset, service)


def _rds_seconds(session: MysqlSession) -> float | None:
    """Return for how many seconds Amazon's services keep the log; None if we may not see it."""
    rows = session.rows_or_refusal(_RDS_HOURS, *_HIDDEN)
    if rows is None:
        return None
    hours = rows[0]["value"] if rows else None
    return 0.0 if hours is None else float(hours) * _HOUR
