"""Translate errors of MySQL into the errors of this package.

The error number decides (manual: "Server Error Message Reference"). Error 1236 stands for
everything that can end a dump of the binary log, so there the English words of its message decide,
as they are in the server's source (`rpl_binlog_sender.cc`). The server's text is repeated only if
it cannot contain a value of a row.
"""

from __future__ import annotations

from collections.abc import Callable

from deltaforge_dagster.errors import (
    AuthFailed,
    CorruptLog,
    DeltaforgeError,
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.findings import one_line

SYNTAX = 1064  # ER_PARSE_ERROR
PRIVILEGE_MISSING = 1227  # ER_SPECIFIC_ACCESS_DENIED_ERROR
DUMP_ENDED = 1236  # ER_MASTER_FATAL_ERROR_READING_BINLOG

_REFUSALS: dict[int, tuple[type[DeltaforgeError], str]] = {
    1040: (SourceUnavailable, "all connections are taken; raise max_connections"),
    1044: (
        PermissionMissing,
        "user {user!r} may not use the database of the DSN; grant it: {text}",
    ),
    1045: (
        AuthFailed,
        (
            "wrong password for user {user!r}, or there is no such user for connections from here"
            " (the server does not say which)"
        ),
    ),
    1047: (
        SourceMisconfigured,
        (
            "the server does not send its log to replicas; if the DSN names a proxy (ProxySQL,"
            " MaxScale, RDS Proxy), name the server behind it"
        ),
    ),
    1049: (SourceMisconfigured, "the database of the DSN does not exist"),
    1130: (AuthFailed, "{text}"),
    1142: (PermissionMissing, "{text}"),
    1143: (PermissionMissing, "{text}"),
    1227: (PermissionMissing, "{text}"),
    1251: (AuthFailed, "{text}"),
    1698: (AuthFailed, "login of user {user!r} refused"),
    1820: (AuthFailed, "the password of user {user!r} must be changed"),
    1862: (AuthFailed, "the password of user {user!r} has expired"),
    2026: (SourceMisconfigured, "{text}; see ssl-mode and ssl-ca of the DSN"),
    3118: (AuthFailed, "the account of user {user!r} is locked"),
    3159: (
        SourceMisconfigured,
        "the server takes only encrypted connections; see ssl-mode of the DSN",
    ),
}
"""By error number: error class and text.

Any other number becomes `SourceUnavailable`, which is retried.
"""

_TAKEN_OVER = (
    "another reader with the same replication server id took over; give each source an id of its "
    "own, from which the server id is made"
)
_DUMP_ENDS: tuple[tuple[str, type[DeltaforgeError], str], ...] = (
    ("purged", PositionLost, ""),
    ("could not find first log file", PositionLost, ""),
    ("position > file size", PositionLost, ""),
    ("impossible position", PositionLost, ""),
    ("more gtids than", PositionLost, ""),
    ("not in the master's binlog", PositionLost, ""),
    ("missing the gtid", PositionLost, ""),
    ("old binary log without gtids", PositionLost, ""),
    ("same server_uuid/server_id", SourceUnavailable, _TAKEN_OVER),
    (
        "binary log is not open",
        SourceMisconfigured,
        "log_bin is OFF; start the server with --log-bin",
    ),
    (
        "server_id was not set",
        SourceMisconfigured,
        "give the server a server_id other than 0, in its configuration file",
    ),
    ("gtid_mode", SourceMisconfigured, "the position has a GTID set, which needs gtid_mode = ON"),
    (
        "anonymous",
        SourceMisconfigured,
        "the log holds transactions without GTID after the position",
    ),
    ("max_allowed_packet", SourceMisconfigured, "raise max_allowed_packet of the server"),
    ("crc check", CorruptLog, "the server cannot read its own log"),
    ("bogus data", CorruptLog, "the server cannot read its own log"),
    ("truncated in the middle", CorruptLog, "the server cannot read its own log"),
)


def translate(
    number: int, message: str, where: str, user: str, account: Callable[[], str]
) -> DeltaforgeError:
    """Return our error for an error of the server.

    Args:
        number: The server's error number, or one of the client's (2000 and more).
        message: Its text; only the first line is used.
        where: The server's address, as in `MysqlSourceServer.where`.
        user: The user as whom we are logged in.
        account: Returns our account on the server, quoted for a statement.
    """
    text = one_line(message)
    if number == DUMP_ENDED:
        return _dump_ended(text, where)
    # MariaDB calls REPLICATION CLIENT the BINLOG MONITOR privilege, and grants it under either
    # name.
    if number == PRIVILEGE_MISSING and ("REPLICATION" in text or "BINLOG MONITOR" in text):
        return _may_not_replicate(where, user, account())
    kind, sentence = _REFUSALS.get(number, (SourceUnavailable, "{text}"))
    return kind(f"{where}: {sentence.format(user=user, text=text)} (error {number})")


def _may_not_replicate(where: str, user: str, account: str) -> PermissionMissing:
    return PermissionMissing(
        f"{where}: user {user!r} may not read the binary log",
        remedy=f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {account}",
    )


def lost(where: str, why: str) -> PositionLost:
    """Return the error for a position after which the binary log is not available."""
    return PositionLost(f"{where}: {why}. Re-snapshot required")


def _dump_ended(text: str, where: str) -> DeltaforgeError:
    reason = text.lower()
    for words, kind, sentence in _DUMP_ENDS:
        if words in reason:
            if kind is PositionLost:
                return lost(
                    where, f"the binary log no longer has what follows the position ({text})"
                )
            return kind(f"{where}: {sentence} ({text})")
    return SourceUnavailable(f"{where}: the server ended the stream ({text})")
