"""Connection poolers (PgBouncer, Supavisor, RDS Proxy), through which a log cannot be read.

A pooler lends one session of the server to many clients. It refuses or loses the settings with
which our sessions begin, and these determine the form of the values in the log. Most poolers refuse
replication, too. A pooler is recognized by what it refuses or loses, never by its address; that
only helps to tell the user which address to use instead.
"""

from __future__ import annotations

from deltaforge_dagster.errors import SourceMisconfigured

PROTOCOL_VIOLATION = "08P01"
"""The SQLSTATE with which PgBouncer refuses start-up parameters that it does not pass on."""

_SUPABASE = "pooler.supabase.com"


def pooled(where: str, host: str, port: str, user: str) -> SourceMisconfigured:
    """Return the error for a pooler, with the address to use instead.

    Args:
        where: The address, as in `PostgresSourceServer.where`.
        host: Its host.
        port: Its port.
        user: The role, whose name may contain the project.
    """
    return SourceMisconfigured(
        f"{where}: a connection pooler answers here, through which no log can be read; "
        f"in source.config.dsn use {_direct_address(host, port, user)}"
    )


def _direct_address(host: str, port: str, user: str) -> str:
    """Return the address of the server behind a pooler, as far as the pooler's reveals it."""
    role, _, project = user.partition(".")
    if host.endswith(_SUPABASE):
        return f"host db.{project or '<project>'}.supabase.co, port 5432 and role {role}"
    if "-pooler." in host:
        return f"host {host.replace('-pooler.', '.', 1)}"
    if ".proxy-" in host:
        return "the endpoint of the instance or cluster itself, not that of its proxy"
    if port != "5432":
        return (
            f"the server's own port instead of {port}, usually 5432, "
            "and its own host if that is another"
        )
    return "the host and port of the server itself"
