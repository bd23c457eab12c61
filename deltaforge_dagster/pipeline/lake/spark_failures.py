"""Classifies errors of Spark and of table formats by what they mean for the table written.

Texts of errors may quote values of rows, so messages show only conditions, names of classes, and
fixed phrases such as "Permission denied".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING

from deltaforge_dagster.errors import (
    DeltaforgeError,
    SettingsError,
    SinkUnavailable,
    SparkUnavailable,
    TableRejected,
)
from deltaforge_dagster.pipeline.run_context import SessionProvider, spark_condition

if TYPE_CHECKING:
    from pyspark.errors import PySparkException


_UNDEFINED_TABLE = "42P01"
"""SQLSTATE of `TABLE_OR_VIEW_NOT_FOUND`, and of Delta's `DELTA_MISSING_DELTA_TABLE`."""


class SparkFailure(Enum):
    """What an error means."""

    LOST = auto()
    """The session or its server is gone."""
    CONFLICT = auto()
    """Another writer has changed the table meanwhile."""
    OCCUPIED = auto()
    """There are files where the table should be: of something else, or of a table being created."""
    MISSING = auto()
    """The server does not have the format."""
    PLACE = auto()
    """The server does not have the catalog, or no library for the storage."""
    UNAVAILABLE = auto()
    """The storage or the catalog cannot be reached, or is full."""
    DENIED = auto()
    """Spark cannot, or is not allowed to, make files there."""
    REJECTED = auto()
    """Anything else: the table cannot take the changes."""


_CLASS = re.compile(r"\(((?:[a-z]\w*\.)+[A-Z][\w$]*)\)|^((?:[a-z]\w*\.)+[A-Z][\w$]*)", re.MULTILINE)
_CAUSE = re.compile(r"^Caused by: (?:[a-z]\w*\.)+([A-Z][\w$]*)", re.MULTILINE)
_ERROR_LINES = re.compile(r"\A.*|^Caused by: .*", re.MULTILINE)
"""Matches the lines of an error's text that name it; others are plans, with values, or traces."""
_MISSING = re.compile(
    r"DATA_SOURCE_NOT_FOUND|Cannot find catalog plugin class|"
    r"ClassNotFoundException: (org\.apache\.iceberg|io\.delta|org\.apache\.spark\.sql\.delta)|"
    r"DELTA_CONFIGURE_SPARK_SESSION"
)
_PLACE = re.compile(
    r"CATALOG_NOT_FOUND|REQUIRES_SINGLE_PART_NAMESPACE|"
    r"Unknown catalog type|Cannot initialize Catalog|"
    r"No suitable driver|No FileSystem for scheme|"
    r"ClassNotFoundException: (Class )?[\w.]*FileSystem\b"
)
_UNAVAILABLE_PHRASES = (
    "No space left on device|Disk quota exceeded|Connection refused|Connection reset|"
    "503 Service Unavailable"
)
_DENIED_PHRASES = (
    "Permission denied|Operation not permitted|Read-only file system|403 Forbidden|"
    "is not a directory"
)
_QUOTABLE = re.compile(f"{_UNAVAILABLE_PHRASES}|{_DENIED_PHRASES}")
"""What may be quoted from an error's text: phrases of the system, which contain no values."""
_UNAVAILABLE = re.compile(
    rf"{_UNAVAILABLE_PHRASES}|ConnectException|Failed to connect|UnknownHostException|"
    r"SocketTimeoutException|SocketException|NoRouteToHostException|"
    r"ServiceUnavailableException|ServiceFailureException|SlowDown|(?i:\bcode:? 503\b)"
)
_CONFLICTS = re.compile(
    r"DELTA_CONCURRENT_|DELTA_METADATA_CHANGED|DELTA_PROTOCOL_CHANGED|DELTA_SCHEMA_CHANGED|"
    r"FIELD_ALREADY_EXISTS|TABLE_OR_VIEW_ALREADY_EXISTS|DELTA_TABLE_ALREADY_EXISTS|"
    r"iceberg\.exceptions\.(CommitFailed|CommitStateUnknown|AlreadyExists)Exception|"
    r"iceberg\.exceptions\.ValidationException(?!\W+Invalid )|"
    r"Cannot fast-forward|Cannot commit rewrite because of a |Snapshot \d+ is not an ancestor of |"
    r"(?i:\b(ref|branch)\b[^\n]* does not exist|does not exist: deltaforge_)|"
    r"Concurrent\w*Exception"
)
_OCCUPIED = re.compile(r"DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION|DELTA_MISSING_DELTA_TABLE")
_DENIED = re.compile(
    rf"{_DENIED_PHRASES}|AccessControlException|AccessDenied|ForbiddenException|"
    r"NotAuthorizedException|(?i:\bcode:? 403\b)|DELTA_CANNOT_CREATE_LOG_PATH|Mkdirs failed"
)


_TRANSLATIONS: Mapping[SparkFailure, tuple[type[DeltaforgeError], str]] = {
    SparkFailure.LOST: (SparkUnavailable, "Spark was lost while it worked on {table} ({reason})"),
    SparkFailure.CONFLICT: (
        TableRejected,
        (
            "{table}: others changed the table during each attempt to write to it ({reason}); "
            "it is tried again later"
        ),
    ),
    SparkFailure.OCCUPIED: (
        TableRejected,
        (
            "{table}: there are files of something else where it should be ({reason}); "
            "remove them, or change where the sink has its tables"
        ),
    ),
    SparkFailure.MISSING: (
        SettingsError,
        (
            "the Spark server lacks what it needs to write {table} ({reason}); install it with "
            "`deltaforge lake install`, and restart `deltaforge dev`, whose Spark server keeps the "
            "jars that it began with; or add the same jars to the server that "
            "DELTAFORGE_SPARK_REMOTE names"
        ),
    ),
    SparkFailure.PLACE: (
        SettingsError,
        (
            "the Spark server cannot use the place of {table} ({reason}); correct the sink's path "
            "or catalog, or add the catalog or the storage's jars to the server that "
            "DELTAFORGE_SPARK_REMOTE names"
        ),
    ),
    SparkFailure.UNAVAILABLE: (
        SinkUnavailable,
        "{table}: its storage or catalog cannot be used now ({reason})",
    ),
    SparkFailure.DENIED: (
        TableRejected,
        (
            "{table}: Spark cannot write there ({reason}); make sure that it may make folders and "
            "files there"
        ),
    ),
    SparkFailure.REJECTED: (
        TableRejected,
        "{table}: Spark has failed ({reason}); the log of the Spark server says more",
    ),
}
"""The errors to raise, and their texts."""


PASSING = frozenset({SparkFailure.CONFLICT, SparkFailure.OCCUPIED})
"""Failures that may be over when the same is tried again at once."""


def failure_of(error: PySparkException, sessions: SessionProvider) -> SparkFailure:
    """Return what an error means."""
    if sessions.lost(error):
        return SparkFailure.LOST
    text = "\n".join([error.getCondition() or "", *_ERROR_LINES.findall(str(error))])
    for pattern, failure in (
        (_MISSING, SparkFailure.MISSING),
        (_PLACE, SparkFailure.PLACE),
        (_UNAVAILABLE, SparkFailure.UNAVAILABLE),
        (_CONFLICTS, SparkFailure.CONFLICT),
        (_OCCUPIED, SparkFailure.OCCUPIED),
        (_DENIED, SparkFailure.DENIED),
    ):
        if pattern.search(text):
            return failure
    return SparkFailure.REJECTED


def is_not_found(error: PySparkException) -> bool:
    """Return whether an error says that there is no such table, or for some catalogs no schema.

    A catalog without views reports that instead: if it has no table of a name, Spark asks it for a
    view.
    """
    return (
        error.getSqlState() == _UNDEFINED_TABLE
        or error.getCondition() == "SCHEMA_NOT_FOUND"
        or "without view support" in str(error)
    )


def translated(error: PySparkException, failure: SparkFailure, table: str) -> DeltaforgeError:
    """Return the error to raise for a table.

    Args:
        error: The error that Spark raised.
        failure: What the error means.
        table: What messages call the table.
    """
    error_class, text = _TRANSLATIONS[failure]
    return error_class(text.format(table=table, reason=_reason(error)))


def _reason(error: PySparkException) -> str:
    """Return a short description of the error that contains no values.

    It has the error's condition or the class of Java's exception, the class of its cause, and the
    system's phrase.
    """
    text = str(error)
    name = error.getCondition()
    if name is None or name.startswith("_LEGACY"):
        java_class = _CLASS.search(text)
        name = (
            (java_class[1] or java_class[2]).rpartition(".")[2]
            if java_class
            else spark_condition(error)
        )
    causes = [cause for cause in _CAUSE.findall(text) if cause != name]
    reason = f"{name}, caused by {causes[-1]}" if causes else name
    words = _QUOTABLE.search("\n".join(_ERROR_LINES.findall(text)))
    return f"{reason}: {words[0]}" if words else reason
