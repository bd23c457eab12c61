"""Recognize the service that runs a server, and say how a setting is changed there.

Managed services refuse `SET PERSIST` and `SET GLOBAL`: their settings are changed outside the
server, in a parameter group, in flags or in server parameters. Amazon's services also have their
own setting for how long the binary log is kept (`server_log`).

A service is recognized by what its server reports: the paths of its files, a part of its version,
and variables that no other server has. The host's name counts only if none of these tell: an alias
or a tunnel hides it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deltaforge_dagster.sources.mysql.connection.server import MysqlSession


@dataclass(frozen=True, slots=True)
class SettingChange:
    """How a variable of a server gets another value.

    Attributes:
        advice: What to do, to be appended to a message; empty if `remedy` says it.
        remedy: The statement that does it; None where the service has another way.
    """

    advice: str
    remedy: str | None = None

    @property
    def sentence(self) -> str:
        """The advice or the statement, to be appended to a message without a remedy of its own."""
        return self.advice or f"; run: {self.remedy}"


@dataclass(frozen=True, slots=True)
class MysqlService:
    """Who runs a server.

    Attributes:
        name: Its name, for people; empty for a self-managed server.
        settings_in: Where its settings are changed; empty if statements change them.
        log_off: How to turn on the binary log, for the message that it is off.
        gtids_on: How to turn on GTIDs; empty if the service always has them.
        most_hours: The most hours for which the server keeps its log, if `mysql.rds_configuration`
            decides that; 0 if its variables do.
        unset_keeps: Whether the server keeps its log for ever if no variable says otherwise.
        moves: Whether a failover leads to another server, on which only GTIDs are still valid
            positions.
        no_log: Why its binary log cannot be read; empty if it can.
        files: A part of the paths of the server's files.
        variables: The beginning of the names of variables that only this service has.
        version: A pattern of a part of the server's version.
        hosts: A pattern of the ends of its hosts' names.
        mariadb: Whether the server is MariaDB.
    """

    name: str
    settings_in: str = ""
    log_off: str = "start the server with --log-bin"
    gtids_on: str = 'see "Enabling GTID Transactions Online"'
    most_hours: int = 0
    unset_keeps: bool = True
    moves: bool = False
    no_log: str = ""
    files: str | None = None
    variables: str | None = None
    version: str | None = None
    hosts: str | None = None
    mariadb: bool = False

    def change(self, session: MysqlSession, name: str, value: str | int) -> SettingChange:
        """Return how a variable gets a value that lasts.

        MySQL 8 has `SET PERSIST`; `SET GLOBAL` of other servers lasts until the next restart, so
        the setting belongs in the configuration file as well.
        """
        if self.settings_in:
            return SettingChange(f"; set {name} to {value} {self.settings_in}")
        lasts = session.version >= (8,) and not session.is_mariadb
        return SettingChange("", f"SET {'PERSIST' if lasts else 'GLOBAL'} {name} = {value}")


SELF_MANAGED = MysqlService("")
"""A self-managed server, or one of an unknown service."""

_BACKUPS = (
    "turn on automated backups of the instance (a retention of 1 day or more): they turn on the"
    " binary log"
)

_AURORA = MysqlService(
    "Amazon Aurora MySQL",
    settings_in="in the DB cluster parameter group",
    log_off="set binlog_format to ROW in the DB cluster parameter group, and reboot the writer",
    gtids_on="set gtid-mode and enforce_gtid_consistency to ON in the DB cluster parameter group",
    most_hours=90 * 24,  # the most that mysql.rds_set_configuration accepts on Aurora
    moves=True,
    variables="aurora_version",
    hosts=r"\.cluster(-ro|-custom)?-[a-z0-9]+\.[a-z0-9-]+\.rds\.amazonaws\.com(\.cn)?",
)
_RDS = MysqlService(
    "Amazon RDS for MySQL",
    settings_in="in the DB parameter group",
    log_off=_BACKUPS,
    gtids_on="set gtid-mode and enforce_gtid_consistency to ON in the DB parameter group",
    most_hours=7 * 24,  # the most that mysql.rds_set_configuration accepts
    files="/rdsdb",
    hosts=r"\.rds\.amazonaws\.com(\.cn)?",
)
_RDS_MARIADB = MysqlService(
    "Amazon RDS for MariaDB",
    settings_in="in the DB parameter group",
    log_off=_BACKUPS,
    most_hours=7 * 24,  # as on RDS for MySQL
    files="/rdsdb",
    hosts=r"\.rds\.amazonaws\.com(\.cn)?",
    mariadb=True,
)
_CLOUD_SQL = MysqlService(
    "Google Cloud SQL for MySQL",
    settings_in="in the instance's flags (Edit > Flags)",
    log_off=(
        "turn on point-in-time recovery of the instance (Edit > Data Protection): it turns on the"
        " binary log"
    ),
    gtids_on="Cloud SQL turns it on for every instance that it makes now",
    variables="cloudsql_",
    version="-google",
)
_AZURE = MysqlService(
    "Azure Database for MySQL",
    settings_in="in the server parameters",
    log_off="its servers always have a binary log; does the DSN name the right server?",
    gtids_on=(
        "set enforce_gtid_consistency to ON in the server parameters, then gtid_mode in its steps"
    ),
    unset_keeps=False,
    variables="azure_",
    version="-azure",
    hosts=r"\.mysql\.database\.(azure\.com|chinacloudapi\.cn|usgovcloudapi\.net)",
)
_PLANETSCALE = MysqlService(
    "PlanetScale (Vitess)",
    no_log=(
        "it shows no client its binary log, so nothing can be captured from there; the log of a"
        " MySQL server under your own Vitess can be read, through that server's own address"
    ),
    version="vitess|planetscale",
    hosts=r"\.psdb\.cloud",
)
_DIGITALOCEAN = MysqlService(
    "DigitalOcean Managed MySQL",
    settings_in="in the cluster's configuration (control panel or API)",
    log_off="its clusters always have a binary log; does the DSN name the right server?",
    hosts=r"\.db\.ondigitalocean\.com",
)

# Aurora and RDS for MariaDB precede RDS for MySQL, whose patterns match them, too.
SERVICES = (_PLANETSCALE, _AURORA, _RDS_MARIADB, _RDS, _CLOUD_SQL, _AZURE, _DIGITALOCEAN)
"""The services, in the order in which they are looked for."""

_PATHS = ("basedir", "datadir")
_SERVICE_VARIABLES = " OR ".join(
    f"Variable_name LIKE '{service.variables}%'" for service in SERVICES if service.variables
)
_QUERY = f"SHOW GLOBAL VARIABLES WHERE Variable_name IN {_PATHS} OR {_SERVICE_VARIABLES}"


def recognize(version: str, variables: Mapping[str, str], host: str) -> MysqlService:
    """Return the service of a server.

    Args:
        version: The server's version, as it greets with it.
        variables: Its variables; those that `service_of` asks for are enough.
        host: The name by which it was reached.
    """
    lower = version.lower()
    fitting = [service for service in SERVICES if not service.mariadb or "mariadb" in lower]
    for service in fitting:
        if service.version is not None and re.search(service.version, lower):
            return service
        if service.variables is not None and any(
            name.startswith(service.variables) for name in variables
        ):
            return service
        if service.files is not None and any(
            service.files in variables.get(name, "") for name in _PATHS
        ):
            return service
    for service in fitting:
        if service.hosts is not None and re.search(f"{service.hosts}\\.?\\Z", host.lower()):
            return service
    return SELF_MANAGED


def service_of(session: MysqlSession) -> MysqlService:
    """Return the service that runs a session's server; ask the server unless its version tells."""
    by_version = recognize(session.server_version, {}, "")
    if by_version is not SELF_MANAGED:
        return by_version
    variables = {row["Variable_name"]: str(row["Value"]) for row in session.rows(_QUERY)}
    return recognize(session.server_version, variables, session.host)
