"""A MySQL server that behaves like Amazon RDS for MySQL, as far as a plain server can.

What a customer cannot do there is refused: nobody has SUPER, so `SET GLOBAL` and `SET PERSIST`
fail. The log is kept as `mysql.rds_configuration` says, which `CALL mysql.rds_set_configuration`
changes. Connections need TLS and end after a minute of silence. Files are where the service has
them.

What customers do in the console is `set_parameters`, `add_standby` and `fail_over`; what the
service does by itself is `remove_log`.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

from deltaforge_dagster.installation.process import Account, remove_directory, temporary_directory
from deltaforge_lab.servers.mysql import MysqlServer, execute

ADMINISTRATOR = "admin"
"""The user that a customer of the service gets (its master user)."""

_GRANTS = (
    "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, RELOAD, PROCESS, REFERENCES, INDEX, ALTER,"
    " SHOW DATABASES, CREATE TEMPORARY TABLES, LOCK TABLES, EXECUTE, REPLICATION SLAVE,"
    " REPLICATION CLIENT, CREATE VIEW, SHOW VIEW,"
    " CREATE ROUTINE, ALTER ROUTINE, CREATE USER, EVENT, TRIGGER"
)
"""What the service grants its master user on everything."""

_PARAMETERS = {
    "binlog_format": "MIXED",
    "gtid_mode": "OFF_PERMISSIVE",
    "enforce_gtid_consistency": "OFF",
    "wait_timeout": "60",
    "interactive_timeout": "60",
}
"""Parameters of a new instance, where they differ from the defaults of our servers."""

_REQUIRE_TLS = "SET GLOBAL require_secure_transport = ON"
_SERVICE = (
    "CREATE USER 'rdsadmin'@'localhost' IDENTIFIED BY '{password}'",
    "GRANT ALL ON *.* TO 'rdsadmin'@'localhost'",
    "CREATE USER '{administrator}'@'%' IDENTIFIED BY '{password}'",
    "GRANT {grants} ON *.* TO '{administrator}'@'%' WITH GRANT OPTION",
    (
        "CREATE TABLE mysql.rds_configuration"
        " (name VARCHAR(100) PRIMARY KEY, value VARCHAR(100), description VARCHAR(300))"
    ),
    """
    INSERT INTO mysql.rds_configuration VALUES ('binlog retention hours', NULL,
        'binlog retention hours specifies the duration in hours before binary logs are '
        'automatically deleted.')
    """,
    """
    CREATE DEFINER = 'rdsadmin'@'localhost'
    PROCEDURE mysql.rds_set_configuration(given VARCHAR(100), hours INT)
    BEGIN
        IF given <> 'binlog retention hours' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'Unknown configuration name';
        END IF;
        IF hours NOT BETWEEN 1 AND 168 THEN
            SIGNAL SQLSTATE '45000'
            SET MESSAGE_TEXT = 'binlog retention hours must be NULL or between 1 and 168';
        END IF;
        UPDATE mysql.rds_configuration SET value = hours WHERE name = given;
    END
    """,
    """
    CREATE DEFINER = 'rdsadmin'@'localhost' PROCEDURE mysql.rds_show_configuration()
    SELECT name, value, description FROM mysql.rds_configuration
    """,
    _REQUIRE_TLS,
)


class MysqlServiceServer:
    """An instance of the service. A context manager: leaving it stops its servers.

    Attributes:
        authority: The certificate of the authority that signs the server's certificate.
    """

    def __init__(
        self, home: Path, server: MysqlServer, settings: Mapping[str, str], authority: Path
    ) -> None:
        self.authority = authority
        self._home = home
        self._settings = dict(settings)
        self._server = server
        self._standby: MysqlServer | None = None
        self._former: list[MysqlServer] = []
        self._password = secrets.token_urlsafe(12)

    @classmethod
    def start(
        cls, certificate: Path, key: Path, parameters: Mapping[str, str] | None = None
    ) -> Self:
        """Create an instance with automated backups, and so with a binary log.

        Args:
            certificate: A certificate of 127.0.0.1 that is its own authority.
            key: The certificate's key.
            parameters: Parameters that differ from those of a new instance, and other settings of
                the server.
        """
        account = Account.ordinary()
        home = temporary_directory("rds", account)
        tls = {}
        for name, source in (("ssl_ca", certificate), ("ssl_cert", certificate), ("ssl_key", key)):
            copy = home / name
            shutil.copy(source, copy)
            copy.chmod(0o600)
            if account:
                shutil.chown(copy, account.uid, account.gid)
            tls[name] = str(copy)
        settings = {**_PARAMETERS, **tls, **(parameters or {})}
        server = MysqlServer.start(home / "rdsdbdata" / "db", settings)
        instance = cls(home, server, settings, certificate)
        try:
            instance._set_up()
        except BaseException:
            instance.close()
            raise
        return instance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, which a failover does not change."""
        parts = urlsplit(self._server.dsn)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def dsn(self, user: str = ADMINISTRATOR, password: str = "", database: str = "") -> str:
        """Return the DSN of a user, by default the administrator, with a verified server."""
        host, port = self.address
        login = f"{quote(user)}:{quote(password or self._password, safe='')}"
        return (
            f"mysql://{login}@{host}:{port}/{database}"
            f"?ssl-mode=VERIFY_IDENTITY&ssl-ca={quote(str(self.authority))}"
        )

    @property
    def standby_dsn(self) -> str:
        """The DSN of the standby's root, which no customer has."""
        assert self._standby
        return self._standby.dsn

    def execute(self, *statements: str, database: str = "") -> list[tuple[Any, ...]]:
        """Execute statements as the administrator; return the rows of the last one."""
        return execute(self.dsn(database=database), *statements)

    def set_parameters(self, parameters: Mapping[str, str]) -> None:
        """Change parameters in the parameter group, and reboot."""
        self._settings |= parameters
        self._server.restart(parameters)
        execute(self._server.dsn, _REQUIRE_TLS)

    def remove_log(self) -> None:
        """Remove what the service removes every few minutes: log older than the retention."""
        ((hours,),) = self._as_service("SELECT value FROM mysql.rds_configuration")
        self._as_service("FLUSH BINARY LOGS")
        if hours is not None:
            self._as_service(f"PURGE BINARY LOGS BEFORE NOW() - INTERVAL {int(hours)} HOUR")
            return
        newest = self._as_service("SHOW BINARY LOGS")[-1][0]
        self._as_service(f"PURGE BINARY LOGS TO '{newest}'")

    def add_standby(self) -> None:
        """Make a read-only replica from a copy of the data, as a snapshot is.

        It follows by GTIDs.
        """
        standby_settings = {"server_id": "2", "read_only": "ON", "skip_slave_start": "ON"}
        data = self._home / "standby" / "rdsdbdata" / "db"
        self._standby = MysqlServer.start(
            data, {**self._settings, **standby_settings}, copy_of=self._server
        )
        execute(self._server.dsn, _REQUIRE_TLS)
        host, port = self.address
        self._as_standby(
            f"CHANGE MASTER TO MASTER_HOST = '{host}', MASTER_PORT = {port}, MASTER_SSL = 1,"
            f" MASTER_USER = '{ADMINISTRATOR}', MASTER_PASSWORD = '{self._password}',"
            " MASTER_AUTO_POSITION = 1",
            "START SLAVE",
        )

    def delay_standby(self) -> None:
        """Let the standby receive the log, and not apply it, until it is promoted."""
        self._as_standby("STOP SLAVE SQL_THREAD")

    def standby_has(self, gtids: str) -> bool:
        """Return whether the standby has received these transactions, applied or not."""
        received = _received(self._as_standby("SHOW SLAVE STATUS"))
        return bool(self._as_standby(f"SELECT GTID_SUBSET('{gtids}', '{received}')")[0][0])

    def fail_over(self) -> None:
        """Kill the primary, and let the standby answer at its address.

        The standby stays read-only until `promote`.
        """
        standby = self._standby
        assert standby
        self._server.stop(immediate=True)
        self._former.append(self._server)
        standby.restart_at(self.address[1])
        self._server, self._standby = standby, None
        execute(standby.dsn, _REQUIRE_TLS)

    def promote(self) -> None:
        """Let the former standby apply what it has received, and accept writes."""
        self._as_service("START SLAVE SQL_THREAD")
        received = _received(self._as_service("SHOW SLAVE STATUS"))
        self._as_service(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{received}')")
        self._as_service("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = OFF")

    def close(self) -> None:
        """Stop the servers and remove their files."""
        for server in (self._standby, self._server, *self._former):
            if server is not None:
                server.stop(immediate=True)
                server.close()
        remove_directory(self._home)

    def _set_up(self) -> None:
        names = {
            "administrator": ADMINISTRATOR,
            "password": self._password,
            "grants": _GRANTS,
        }
        execute(self._server.dsn, *(statement.format(**names) for statement in _SERVICE))

    def _as_service(self, *statements: str) -> list[tuple[Any, ...]]:
        return execute(f"{self._server.dsn}?ssl-mode=REQUIRED", *statements)

    def _as_standby(self, *statements: str) -> list[tuple[Any, ...]]:
        return execute(self.standby_dsn, *statements)


def _received(status: list[tuple[Any, ...]]) -> str:
    """Return the transactions that a replica has received or executed, from its status row."""
    return ",".join(text for text in status[0][51:53] if text)
