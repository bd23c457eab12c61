"""Translates ClickHouse's exceptions.

An answer that reports an error has the number of the exception in the header
`X-ClickHouse-Exception-Code`, and a text that ends with its name: `Code: 60. DB::Exception: ...
(UNKNOWN_TABLE)`. The text may quote values of rows, so messages contain only the number, the name,
and those parts of the text that name an object.
"""

from __future__ import annotations

import re

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SinkUnavailable,
    TableRejected,
)

NO_DATABASE = 81
NO_TABLE = 60
NULL = 349
_LOGIN = frozenset({192, 193, 194, 516})
"""UNKNOWN_USER, WRONG_PASSWORD, REQUIRED_PASSWORD, AUTHENTICATION_FAILED."""
_DENIED = 497
_TRANSIENT = frozenset(
    {
        159,  # TIMEOUT_EXCEEDED
        160,  # TOO_SLOW
        198,  # DNS_ERROR
        202,  # TOO_MANY_SIMULTANEOUS_QUERIES
        203,  # NO_FREE_CONNECTION
        209,  # SOCKET_TIMEOUT
        210,  # NETWORK_ERROR
        216,  # QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING
        225,  # NO_ZOOKEEPER
        236,  # ABORTED
        241,  # MEMORY_LIMIT_EXCEEDED
        242,  # TABLE_IS_READ_ONLY
        243,  # NOT_ENOUGH_SPACE
        252,  # TOO_MANY_PARTS
        254,  # NO_ACTIVE_REPLICAS
        279,  # ALL_CONNECTION_TRIES_FAILED
        285,  # TOO_FEW_LIVE_REPLICAS
        286,  # UNSATISFIED_QUORUM_FOR_PREVIOUS_WRITE
        319,  # UNKNOWN_STATUS_OF_INSERT
        394,  # QUERY_WAS_CANCELLED
        425,  # SYSTEM_ERROR
        473,  # DEADLOCK_AVOIDED
        499,  # S3_ERROR
        999,  # KEEPER_EXCEPTION
    }
)
"""Exceptions whose cause can disappear by itself, so the query is tried again."""

_NAME = re.compile(r"\(([A-Z][A-Z0-9_]+)\)[^()]*(?:\(version [^()]*\([^()]*\)\))?\s*$")
_GRANT = re.compile(r"necessary to have the grant ([A-Z][A-Z ]*(?:\([^()]*\))? ON [^\s(]+)")
_COLUMN = re.compile(r"(?:column|key) [`'\"]?([A-Za-z0-9_]+)[`'\"]?")


def failure(subject: str, status: int, code: int | None, text: str) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an answer that is no success.

    Args:
        subject: The sink, or a table of it.
        status: The status of the answer.
        code: The number of the exception, None without one.
        text: Its text.
    """
    if code is None:
        return _unknown(subject, status)
    name = _NAME.search(text)
    exception = f"exception {code}" + (f" ({name[1]})" if name else "")
    if code in _LOGIN:
        return AuthFailed(
            f"{subject}: ClickHouse refuses the user or the password ({exception}); correct `user` "
            "and `password`"
        )
    if code == _DENIED:
        grant = _GRANT.search(text)
        needed = f": it needs the grant {grant[1].rstrip('.')}" if grant else ""
        return PermissionMissing(f"{subject}: the user lacks a privilege{needed} ({exception})")
    if code in _TRANSIENT:
        return SinkUnavailable(f"{subject}: ClickHouse refuses for now with {exception}")
    return TableRejected(f"{subject}: {_refused(code, text)} ({exception})")


def _unknown(subject: str, status: int) -> DeltaforgeError:
    """Return the error for an answer without an exception's number, which may be a proxy's."""
    reply = f"the server answered with status {status}"
    if status in {401, 403}:
        return AuthFailed(f"{subject}: {reply}; check `user` and `password`")
    if status in {408, 429} or status >= 500:
        return SinkUnavailable(f"{subject}: {reply}")
    return TableRejected(f"{subject}: {reply}, which is not an answer of ClickHouse; check `url`")


def _refused(code: int, text: str) -> str:
    """Return what is wrong with a table, and the remedy."""
    if code == NO_DATABASE:
        return "the database does not exist; create it with CREATE DATABASE, or correct `database`"
    if code == NO_TABLE:
        return "the table does not exist"
    if code == NULL:
        column = _COLUMN.search(text)
        where = f" {column[1]}" if column else ""
        return (
            f"a value is null, and the column{where} of the table cannot be; make it Nullable with "
            "ALTER TABLE ... MODIFY COLUMN"
        )
    return "ClickHouse refuses a statement; see the server's log"
