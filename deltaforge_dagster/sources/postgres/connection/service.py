"""Managed PostgreSQL services: how each is recognized, and how its settings and rights are changed.

None of them gives its users a superuser. So `ALTER SYSTEM` is refused, and often
`ALTER ROLE ... REPLICATION`, too. A service is recognized by what only its servers have: functions
and settings, then roles. A role alone proves little on a server with a real superuser, since a dump
of roles can be restored anywhere. The host's name decides only if nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import Commands


@dataclass(frozen=True, slots=True)
class PostgresService:
    """A service, or a server that its users run themselves.

    Attributes:
        name: Its name, for people.
        functions: Functions that only its servers have.
        settings: Settings that only its servers have; every role may read them.
        roles: Roles that its servers have.
        hosts: Ends of its servers' names.
        setting: The sentence that says how to change `{name}` to `{value}`; empty where `ALTER
            SYSTEM` does it.
        restart: What follows that sentence if the change needs a restart.
        own: Complete sentences for single settings, which replace `setting` and `restart`.
        grant: The statement that lets `{role}` replicate; empty if no statement does.
        granted: Who executes it, or what to do instead.
        primary: The address of a primary, for people.
        caution: A property of the service that can cost a pipeline its position; empty if there is
            none.
    """

    name: str
    functions: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    setting: str = ""
    restart: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    grant: str = "ALTER ROLE {role} REPLICATION"
    granted: str = ""
    primary: str = "its address"
    caution: str = ""

    @property
    def managed(self) -> bool:
        """Whether its users have no superuser."""
        return bool(self.setting)

    def change(self, name: str, value: str, *, restarts: bool) -> str:
        """Return how to give a setting a value, as a sentence for people.

        Args:
            name: The setting.
            value: The value.
            restarts: Whether the value takes effect only when the server restarts.
        """
        sentence = self.setting + (self.restart if restarts else "")
        return self.own.get(name, sentence).format(name=name, value=value)

    def replication(self, role: str) -> tuple[str, Commands]:
        """Return who lets a role replicate, or what else to do, with the statement if any."""
        quoted = sql.Identifier(role).as_string(None)
        return self.granted, (self.grant.format(role=quoted),) if self.grant else ()


SELF_MANAGED = PostgresService("self-managed")
"""A server with a superuser who may do everything."""

_RDS = (
    "set {name} = {value} in the DB parameter group of the instance "
    "(a custom one, since the default cannot be changed)"
)
_CLOUD_FLAG = "set the flag {name} = {value} of the instance (console: Edit, Flags)"
_AURORA = "set {name} = {value} in the DB cluster parameter group of the cluster (a custom one)"

SERVICES = (
    PostgresService(
        "Amazon Aurora PostgreSQL",
        functions=("aurora_version",),
        setting=_AURORA,
        restart=" and reboot the writer",
        own={
            "wal_level": "set rds.logical_replication = 1 in the DB cluster parameter group "
            "of the cluster (a custom one) and reboot the writer"
        },
        grant="GRANT rds_replication TO {role}",
        granted="the master user grants it",
        primary="the endpoint of the cluster (`.cluster-`, not `.cluster-ro-`), "
        "which follows the writer",
    ),
    PostgresService(
        "Amazon RDS for PostgreSQL",
        settings=("rds.logical_replication",),
        roles=("rds_superuser",),
        hosts=(".rds.amazonaws.com", ".rds.amazonaws.com.cn"),
        setting=_RDS,
        restart=" and reboot the instance",
        own={
            "wal_level": "set rds.logical_replication = 1 in the DB parameter group "
            "of the instance (a custom one, since the default cannot be changed) "
            "and reboot the instance"
        },
        grant="GRANT rds_replication TO {role}",
        granted="the master user grants it",
        primary="the endpoint of the instance itself, not that of a read replica",
    ),
    PostgresService(
        "Google AlloyDB for PostgreSQL",
        settings=("alloydb.logical_decoding",),
        roles=("alloydbsuperuser",),
        setting=_CLOUD_FLAG,
        restart=", which restarts it",
        own={
            "wal_level": "set the flag alloydb.logical_decoding = on of the primary instance, "
            "which restarts it"
        },
        granted="the user postgres sets it",
    ),
    PostgresService(
        "Google Cloud SQL for PostgreSQL",
        settings=("cloudsql.logical_decoding",),
        roles=("cloudsqlsuperuser",),
        setting=_CLOUD_FLAG,
        restart=", which restarts it",
        own={
            "wal_level": "set the flag cloudsql.logical_decoding = on of the instance "
            "(console: Edit, Flags), which restarts it"
        },
        granted="the user postgres sets it",
    ),
    PostgresService(
        "Azure Database for PostgreSQL",
        settings=("azure.extensions",),
        roles=("azure_pg_admin",),
        hosts=(".postgres.database.azure.com",),
        setting="set the server parameter {name} = {value} (portal: Server parameters)",
        restart=" and restart the server",
        granted="the server's admin user sets it",
    ),
    PostgresService(
        "Supabase",
        roles=("supabase_admin",),
        hosts=(".supabase.co", ".supabase.com"),
        setting="set it with the Supabase CLI: "
        "supabase postgres-config update --config {name}={value}",
        own={
            "wal_level": "ask Supabase's support why wal_level is not logical, "
            "which it is by default"
        },
        granted="the role postgres sets it",
    ),
    PostgresService(
        "Neon",
        roles=("neon_superuser",),
        hosts=(".neon.tech",),
        setting="ask Neon's support to set {name} = {value}",
        own={
            "wal_level": "enable logical replication in the settings of the project "
            "in Neon's console, which restarts its computes"
        },
        grant="",
        granted="make the role in Neon's console, with its CLI or API: "
        "such a role may replicate, one made with SQL may not",
        caution="Neon drops a replication slot that nobody has read for about 40 hours "
        "while another one is read: let the pipeline run at least once a day, "
        "or all the time, and do not pause it for longer",
    ),
)
"""Every service that is recognized; the first that matches counts."""


def recognized(connection: psycopg.Connection) -> PostgresService:
    """Return the service that runs the server of a connection with autocommit."""
    row = connection.execute(
        """
        SELECT ARRAY(SELECT proname::text FROM pg_proc WHERE proname = ANY (%s)),
               ARRAY(SELECT rolname::text FROM pg_roles WHERE rolname = ANY (%s)),
               (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
        """,
        (
            [name for service in SERVICES for name in service.functions],
            [name for service in SERVICES for name in service.roles],
        ),
    ).fetchone()
    assert row is not None
    functions, roles, superuser = row
    for service in SERVICES:
        if set(service.functions) & set(functions):
            return service
        if service.settings and _has_setting(connection, service.settings):
            return service
    if superuser:
        return SELF_MANAGED
    host = connection.info.host
    of_roles = (service for service in SERVICES if set(service.roles) & set(roles))
    of_hosts = (service for service in SERVICES if host.endswith(service.hosts))
    return next(of_roles, None) or next(of_hosts, SELF_MANAGED)


def _has_setting(connection: psycopg.Connection, names: tuple[str, ...]) -> bool:
    """Return whether the server has one of the settings; one that our role may not read counts."""
    try:
        row = connection.execute(
            "SELECT bool_or(current_setting(name, true) IS NOT NULL)"
            " FROM unnest(%s::text[]) AS name",
            (list(names),),
        ).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return True
    return row is not None and bool(row[0])
