"""What an error of Spark or of a table format means for a table that was written.

Texts of errors may quote values of rows, so only conditions and names of classes are shown.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING

from deltaforge_dagster.errors import (
    DeltaforgeError,
    SettingsError,
    SinkUnavailable,
    SparkUnavailable,
    TableRejected,
)
from deltaforge_dagster.pipeline.spark_session import SessionProvider, spark_condition

if TYPE_CHECKING:
    from pyspark.errors import PySparkException


class SparkFailure(Enum):
    """What an error means."""

    LOST = auto()
    """The session or its server is gone."""
    CONFLICT = auto()
    """Somebody else has changed the table meanwhile."""
    MISSING = auto()
    """The server does not have the format."""
    UNAVAILABLE = auto()
    """The storage or the catalog cannot be reached, or is full."""
    DENIED = auto()
    """Spark may not do that."""
    REJECTED = auto()
    """Anything else: the table cannot take the changes."""


_CLASS = re.compile(r"\(((?:[a-z]\w*\.)+[A-Z][\w$]*)\)|^((?:[a-z]\w*\.)+[A-Z][\w$]*)", re.MULTILINE)
_CONFLICTS = re.compile(
    r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|DELTA_SCHEMA_CHANGED|"
    r"FIELD_ALREADY_EXISTS|TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_TABLE_ALREADY_EXISTS|"
    r"iceberg\.exceptions\.(CommitFailed|CommitStateUnknown|Validation|AlreadyExists)Exception|"
    r"Cannot fast-forward|(?i:\b(ref|branch)\b[^\n]* does not exist|does not exist: deltaforge_)|Concurrent\w*Exception"
)
_MISSING = re.compile(
    r"DATA_SOURCE_NOT_FOUND|CATALOG_NOT_FOUND|Cannot find catalog plugin class|"
    r"ClassNotFoundException: (org\.apache\.iceberg|io\.delta|org\.apache\.spark\.sql\.delta)|"
    r"DELTA_CONFIGURE_SPARK_SESSION"
)
_DENIED = re.compile(
    r"Permission denied|AccessControlException|AccessDenied|ForbiddenException|NotAuthorizedException|"
    r"Operation not permitted|\b403\b"
)
_UNAVAILABLE = re.compile(
    r"No space left on device|Disk quota exceeded|ConnectException|Connection refused|Connection reset|"
    r"UnknownHostException|SocketTimeoutException|SocketException|NoRouteToHostException|"
    r"ServiceUnavailableException|ServiceFailureException|SlowDown|\b503\b"
)


def failure_of(error: PySparkException, sessions: SessionProvider) -> SparkFailure:
    """Return what an error means."""
    if sessions.lost(error):
        return SparkFailure.LOST
    text = f"{error.getCondition() or ''} {error}"
    for pattern, failure in (
        (_MISSING, SparkFailure.MISSING),
        (_CONFLICTS, SparkFailure.CONFLICT),
        (_DENIED, SparkFailure.DENIED),
        (_UNAVAILABLE, SparkFailure.UNAVAILABLE),
    ):
        if pattern.search(text):
            return failure
    return SparkFailure.REJECTED


def translated(error: PySparkException, failure: SparkFailure, table: str) -> DeltaforgeError:
    """Return the error to raise for a table.

    Args:
        error: What Spark raised.
        failure: What it means.
        table: What messages call the table.
    """
    reason = _reason(error)
    match failure:
        case SparkFailure.LOST:
            return SparkUnavailable(f"Spark was lost while it wrote to {table} ({reason})")
        case SparkFailure.MISSING:
            return SettingsError(
                f"the Spark server lacks what it needs to write {table} ({reason}); install it with "
                "`deltaforge lake install` and start the server again, or add the same jars to the server that "
                "DELTAFORGE_SPARK_REMOTE names"
            )
        case SparkFailure.DENIED:
            return TableRejected(
                f"{table}: Spark may not write there ({reason}); grant it access to the table's folder"
            )
        case SparkFailure.UNAVAILABLE:
            return SinkUnavailable(f"{table}: its storage cannot be written now ({reason})")
        case _:
            return TableRejected(
                f"{table} cannot be written ({reason}); the log of the Spark server says more"
            )


def _reason(error: PySparkException) -> str:
    """Return a short name of the error: its condition, or the class of Java's exception."""
    if condition := error.getCondition():
        return condition
    if found := _CLASS.search(str(error)):
        return (found[1] or found[2]).rpartition(".")[2]
    return spark_condition(error)
