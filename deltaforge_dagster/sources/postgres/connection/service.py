"""Managed PostgreSQL services: how each is recognized, and how its settings and rights are changed.

None of them gives its users a superuser. So `ALTER SYSTEM` is refused, and often
`ALTER ROLE ... REPLICATION`, too. A service is recognized by what only its servers have: functions
and settings, then roles. A role alone proves little on a server with a real superuser, since a dump
of roles can be restored anywhere. The host's name decides only if nothing else does.

A service has its own way to change settings. Elsewhere `ALTER SYSTEM` writes a value into the
server's configuration. After a reload, `pg_settings.pending_restart` says that the value waits for
a restart; before that, only superusers can see it, in the configuration files (manual:
"pg_settings", "pg_file_settings").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import Commands

_RDS = (
    "set {name} = {value} in the DB parameter group of the instance "
    "(a custom one, since the default cannot be changed)"
)
_CLOUD_FLAG = "set the flag {name} = {value} of the instance (console: Edit, Flags)"
_AURORA = "set {name} = {value} in the DB cluster parameter group of the cluster (a custom one)"
_RELOAD = "SELECT pg_reload_conf()"
_SPARE = 10
"""How many slots or senders to add on a server that has no free one."""
_FILES = "pg_show_all_file_settings()"
_MIB = 1 << 20
_GIB = 1 << 30


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


def after_restart(connection: psycopg.Connection, name: str, value: str) -> tuple[str, Commands]:
    """Return how to set a setting: a sentence for people, and the statements to execute first.

    Args:
        connection: A connection to the server.
        name: The setting, which a running server cannot change.
        value: The value, as it is written in a statement and in the configuration.
    """
    service = recognized(connection)
    if service.managed:
        return service.change(name, value, restarts=True), ()
    row = connection.execute(
        "SELECT source, pending_restart, has_function_privilege(%s, 'EXECUTE')"
        " FROM pg_settings WHERE name = %s",
        (_FILES, name),
    ).fetchone()
    assert row is not None
    source, waits, may_read = row
    if source == "command line":
        return (
            (
                f"{name} is set on the server's command line, "
                f"so change it there ({name}={value}) and restart the server"
            ),
            (),
        )
    if waits or (may_read and _is_written(connection, name, value)):
        return f"{name} is changed in its configuration, for which the server must be restarted", ()
    statements = (f"ALTER SYSTEM SET {name} = {value}", _RELOAD)
    return "the server must be restarted after the change", statements


def no_room(connection: psycopg.Connection, what: str, setting: str) -> tuple[str, Commands]:
    """Return what to do if all slots or senders are in use, in the form of `after_restart`.

    Args:
        connection: A connection to the server.
        what: `replication slots` or `WAL senders`, for people.
        setting: The setting that limits their number.
    """
    row = connection.execute("SELECT current_setting(%s)::int", (setting,)).fetchone()
    assert row is not None
    restart, statements = after_restart(connection, setting, str(row[0] + _SPARE))
    return f"all {what} are in use; drop or end one, or have more: {restart}", statements


def more_log(connection: psycopg.Connection, wanted: int) -> tuple[str, Commands]:
    """Return how to let slots keep more log than now, in the form of `after_restart`.

    The limit stays finite, because a slot without one fills the server's disk.

    Args:
        connection: A connection to the server.
        wanted: The bytes of log that are expected to be kept.
    """
    row = connection.execute(
        "SELECT setting::int8 * 1048576, source FROM pg_settings"
        " WHERE name = 'max_slot_wal_keep_size'"
    ).fetchone()
    assert row is not None  # servers before 13 have no limit, so none is too small
    limit, source = row
    size = -(-2 * max(wanted, limit) // _GIB) * _GIB // _MIB
    text = f"if the server's disk has room for {size:,} MB of log beside the data, "
    service = recognized(connection)
    if service.managed:
        return text + service.change("max_slot_wal_keep_size", str(size), restarts=False), ()
    if source == "command line":
        text += "change the limit on the server's command line"
        return f"{text} (max_slot_wal_keep_size={size}) and restart the server", ()
    statements = (f"ALTER SYSTEM SET max_slot_wal_keep_size = '{size}MB'", _RELOAD)
    return f"{text}raise the limit", statements


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


def _is_written(connection: psycopg.Connection, name: str, value: str) -> bool:
    """Return whether the configuration files have a value of a setting."""
    row = connection.execute(
        f"SELECT setting = %s FROM {_FILES}"  # noqa: S608 - a constant
        " WHERE name = %s ORDER BY seqno DESC LIMIT 1",
        (value, name),
    ).fetchone()
    return row is not None and bool(row[0])
