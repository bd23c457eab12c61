"""Translate errors of PostgreSQL into the errors of this package.

The SQLSTATE decides (manual: appendix "PostgreSQL Error Codes"), never the text, which is in
the server's language. The server's text is repeated only if it cannot contain a value of a row.
"""

from __future__ import annotations

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.sources.findings import one_line
from deltaforge_dagster.sources.postgres.connection.service import PostgresService

_EXACT: dict[str, tuple[type[DeltaforgeError], str]] = {
    "28P01": (
        AuthFailed,
        (
            "wrong password for role {user!r}, or there is no such role "
            "(the server does not say which)"
        ),
    ),
    "3D000": (SourceMisconfigured, "the database does not exist"),
    "53300": (
        SourceUnavailable,
        "all connections are taken; raise max_connections or max_wal_senders",
    ),
    "57014": (SourceUnavailable, "the server did not answer in time"),
}

_CLASSES: dict[str, tuple[type[DeltaforgeError], str]] = {
    # The server's text for a data exception quotes the value.
    "22": (UnsupportedEvent, "the server could not convert a value, and its own log names it"),
    "28": (AuthFailed, "login of role {user!r} refused: {text}"),
    "42": (SourceMisconfigured, "{text}"),
}
"""By class, the first two characters.

Any other (08, 53, 57, 58 ...) becomes `SourceUnavailable`, which is retried.
"""

NOT_PERMITTED = "42501"
NOT_SUPPORTED = "0A000"
UNKNOWN_OBJECT = "42704"
IN_USE = "55006"
NOT_IN_THIS_STATE = "55000"
CANCELLED = "57014"
LOCKED = "55P03"
NO_FUNCTION = "42883"

FUNCTION_REFUSED = frozenset({NOT_PERMITTED, NOT_SUPPORTED, NOT_IN_THIS_STATE, NO_FUNCTION})
"""SQLSTATEs with which servers refuse functions of the log: a service has removed the function, or
nobody may call it in the server's present state."""


def translate(sqlstate: str | None, message: str, where: str, user: str) -> DeltaforgeError:
    """Return our error for an error of the server.

    Args:
        sqlstate: Its SQLSTATE; None if the connection broke.
        message: Its text; only the first line is used.
        where: The server's address, as in `PostgresSourceServer.where`.
        user: The role as which we are logged in.
    """
    text = one_line(message)
    if not sqlstate:
        return SourceUnavailable(f"{where}: connection lost ({text})")
    if sqlstate == NOT_PERMITTED:
        return PermissionMissing(f"{where}: role {user!r} may not do this: {text}")
    default = (SourceUnavailable, "{text}")
    kind, sentence = _EXACT.get(sqlstate) or _CLASSES.get(sqlstate[:2], default)
    return kind(f"{where}: {sentence.format(user=user, text=text)} (SQLSTATE {sqlstate})")


def may_not_replicate(where: str, user: str, service: PostgresService) -> DeltaforgeError:
    """Return the error for a role that may not replicate, with what its service does about it."""
    text, remedy = service.replication(user)
    more = f": {text}" if text else ""
    return PermissionMissing(f"{where}: role {user!r} may not replicate{more}", remedy=remedy)


def connection_error(text: str, where: str) -> DeltaforgeError:
    """Return the error for a connection that failed to open, without a server's error."""
    reason = one_line(text)
    if "TLS" in reason or "SSL" in reason or "certificate" in reason:
        return SourceMisconfigured(f"{where}: {reason}; see sslmode and sslrootcert of the DSN")
    return SourceUnavailable(f"{where}: {reason}")
