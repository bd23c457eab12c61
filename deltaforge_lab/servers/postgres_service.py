"""A PostgreSQL server that behaves like one of a managed service, as far as a plain server can.

What a customer of the service cannot do is refused: nobody is a superuser, functions of the log are
taken away, connections need TLS. Roles and settings have the service's names. On RDS and Aurora a
member of `rds_replication` may replicate although its role has no such attribute: the server gives
members the attribute, and its `pg_roles` does not show it.

What customers do in the console is `set_parameters` and `fail_over`; SQL of theirs is `execute`.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg
from psycopg import conninfo, sql

from deltaforge_lab.servers.postgres import PostgresServer

ADMINISTRATOR = "master"
"""The role that a customer of the service gets."""

_LOG_FUNCTIONS = (
    "pg_control_system()",
    "pg_current_wal_flush_lsn()",
    "pg_current_wal_insert_lsn()",
    "pg_current_wal_lsn()",
    "pg_walfile_name(pg_lsn)",
)

_LET_MEMBERS_REPLICATE = (
    "UPDATE pg_authid SET rolreplication = pg_has_role(oid, '{}', 'MEMBER')"
    " WHERE rolcanlogin AND NOT rolsuper AND rolname <> 'master'"
)


@dataclass(frozen=True, slots=True)
class ServiceProfile:
    """How the servers of a service differ from a plain one.

    Attributes:
        name: The service's name.
        roles: Roles of the service, which the customer's administrator is a member of and may
            grant.
        attributes: Attributes of the administrator besides CREATEDB and CREATEROLE.
        settings: Settings that only the service has.
        logical: The parameter and its value that turn on logical replication; empty if it is always
            on.
        replicators: The role whose members may replicate; empty if the attribute decides.
        refused: Functions that nobody may call.
        functions: Functions that only the service has, as statements.
    """

    name: str
    roles: tuple[str, ...]
    attributes: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    logical: tuple[str, str] | None = None
    replicators: str = ""
    refused: tuple[str, ...] = ("pg_control_system()", "pg_walfile_name(pg_lsn)")
    functions: tuple[str, ...] = ()


RDS = ServiceProfile(
    "Amazon RDS for PostgreSQL",
    ("rds_superuser", "rds_replication"),
    settings={"rds.logical_replication": "off"},
    logical=("rds.logical_replication", "1"),
    replicators="rds_replication",
)
AURORA = ServiceProfile(
    "Amazon Aurora PostgreSQL",
    ("rds_superuser", "rds_replication"),
    settings={"rds.logical_replication": "off"},
    logical=("rds.logical_replication", "1"),
    replicators="rds_replication",
    refused=_LOG_FUNCTIONS,
    functions=(
        (
            "CREATE FUNCTION pg_catalog.aurora_version() RETURNS text "
            "LANGUAGE sql AS $$SELECT '15.4'$$"
        ),
    ),
)
CLOUD_SQL = ServiceProfile(
    "Google Cloud SQL for PostgreSQL",
    ("cloudsqlsuperuser",),
    attributes="REPLICATION",
    settings={"cloudsql.logical_decoding": "off"},
    logical=("cloudsql.logical_decoding", "on"),
)
AZURE = ServiceProfile(
    "Azure Database for PostgreSQL",
    ("azure_pg_admin",),
    attributes="REPLICATION",
    settings={"azure.extensions": "pg_stat_statements"},
    logical=("wal_level", "logical"),
)
SUPABASE = ServiceProfile("Supabase", ("supabase_admin",), attributes="REPLICATION BYPASSRLS")
NEON = ServiceProfile("Neon", ("neon_superuser",), attributes="REPLICATION BYPASSRLS")


class PostgresServiceServer:
    """A server of a service. A context manager: leaving it stops the server.

    Attributes:
        profile: The service.
        root: The certificate of the authority that signs the server's certificate.
    """

    def __init__(
        self, profile: ServiceProfile, server: PostgresServer, certificate: Path, key: Path
    ) -> None:
        self.profile = profile
        self.root = certificate
        self._key = key
        self._server = server
        self._passwords = {ADMINISTRATOR: secrets.token_urlsafe(12)}

    @classmethod
    def start(
        cls,
        profile: ServiceProfile,
        certificate: Path,
        key: Path,
        settings: Mapping[str, str] | None = None,
        *,
        version: int | None = None,
    ) -> Self:
        """Start a server as the service provides it.

        It is without logical replication, if that has to be turned on.

        Args:
            profile: The service.
            certificate: A certificate of 127.0.0.1 that is its own authority.
            key: The certificate's key.
            settings: Further settings of the server.
            version: As for `PostgresServer.start`.
        """
        level = "replica" if profile.logical else "logical"
        server = PostgresServer.start(
            settings={**(settings or {}), **profile.settings, "wal_level": level}, version=version
        )
        service = cls(profile, server, certificate, key)
        try:
            service._set_up()
        except BaseException:
            server.close()
            raise
        return service

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()

    def dsn(self, database: str = "postgres", role: str = ADMINISTRATOR, password: str = "") -> str:
        """Return the DSN of a role, by default the administrator, with a verified certificate."""
        server = conninfo.conninfo_to_dict(self._server.dsn)
        password = password or self._passwords[role]
        return (
            f"postgres://{quote(role)}:{quote(password)}@{server['host']}:{server['port']}"
            f"/{database}?sslmode=verify-full&sslrootcert={quote(str(self.root))}"
        )

    @property
    def superuser_dsn(self) -> str:
        """The DSN of the service's own superuser, whom no customer has."""
        return self._server.dsn

    def create_database(self, name: str) -> None:
        """Create a database, as the administrator."""
        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)).as_string(None))

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Execute statements as the administrator, each in a transaction of its own."""
        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
        if self.profile.replicators:
            self._as_superuser("postgres", _LET_MEMBERS_REPLICATE.format(self.profile.replicators))

    def set_parameters(self, parameters: Mapping[str, str]) -> None:
        """Change parameters and restart, as the service's console does."""
        if self.profile.logical and self.profile.logical in parameters.items():
            parameters = {**parameters, "wal_level": "logical"}
        self._server.restart(parameters)

    def fail_over(self, *, keeps_slots: bool) -> None:
        """Promote a standby, which then answers at the same address, on a new timeline.

        Args:
            keeps_slots: Whether the standby has the replication slots.
        """
        if not keeps_slots:
            self._server.restart()  # ends every reader of a slot
            self._as_superuser(
                "postgres", "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            )
        self.demote()
        self._as_superuser("postgres", "SELECT pg_promote()")

    def demote(self) -> None:
        """Make the server a standby, which answers reads only, until a failover promotes it."""
        (self._data_directory() / "standby.signal").touch()
        self._server.restart()

    def _set_up(self) -> None:
        roles = [
            sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)) for name in self.profile.roles
        ]
        administrator = sql.Identifier(ADMINISTRATOR)
        statements = [
            *roles,
            sql.SQL("CREATE ROLE {} LOGIN CREATEDB CREATEROLE {} PASSWORD {}").format(
                administrator,
                sql.SQL(self.profile.attributes),
                sql.Literal(self._passwords[ADMINISTRATOR]),
            ),
            *(
                sql.SQL("GRANT {} TO {} WITH ADMIN OPTION").format(
                    sql.Identifier(name), administrator
                )
                for name in self.profile.roles
            ),
        ]
        self._as_superuser("postgres", *(statement.as_string(None) for statement in statements))
        catalog = [
            "SET allow_system_table_mods = on",
            *(f"REVOKE EXECUTE ON FUNCTION {name} FROM PUBLIC" for name in self.profile.refused),
            *self.profile.functions,
        ]
        if self.profile.replicators:
            catalog.append(
                "DO $$BEGIN EXECUTE 'CREATE OR REPLACE VIEW pg_catalog.pg_roles AS ' || replace("
                "pg_get_viewdef('pg_catalog.pg_roles'::regclass), "
                "'pg_authid.rolreplication', 'false AS rolreplication'); END$$"
            )
        for database in ("postgres", "template1"):
            self._as_superuser(database, *catalog)
        self._require_tls()

    def _require_tls(self) -> None:
        """Admit connections only over TLS, with a certificate readable by the server's account."""
        data = self._data_directory()
        owner = data.stat()
        for source, name in ((self.root, "server.crt"), (self._key, "server.key")):
            shutil.copy(source, data / name)
            (data / name).chmod(0o600)
            shutil.chown(data / name, owner.st_uid, owner.st_gid)
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
        self._server.restart({"ssl": "on"})

    def _data_directory(self) -> Path:
        with psycopg.connect(self.superuser_dsn) as connection:
            row = connection.execute("SHOW data_directory").fetchone()
        assert row is not None
        return Path(row[0])

    def _as_superuser(self, database: str, *statements: str) -> None:
        dsn = conninfo.make_conninfo(self.superuser_dsn, dbname=database)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
