"""Types as the catalog writes them, and what the log would say of the same column.

`information_schema.COLUMNS` has a column's type as text (`COLUMN_TYPE`) and its character set
(`CHARACTER_SET_NAME`). From these comes the same `MysqlValueType` as from a TABLE_MAP event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS
from deltaforge_dagster.sources.mysql.values.types import (
    GEOMETRIES,
    LABEL_FORMS,
    LogType,
    MysqlValueType,
    ValueForms,
    mariadb_type,
    value_type,
)

_TYPE = re.compile(r"\s*([a-z0-9_]+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?(.*)", re.DOTALL)
_CODES = {
    "tinyint": 1, "smallint": 2, "mediumint": 9, "int": 3, "bigint": 8, "float": 4, "double": 5,
    "year": 13, "date": 10, "timestamp": 17, "datetime": 18, "time": 19,
}  # fmt: skip
_BLOB_SIZES = {"tiny": 1, "": 2, "medium": 3, "long": 4}
_COLLATIONS = {charset.name: number for number, charset in CHARSETS.items()}
_COLLATIONS["utf8"] = _COLLATIONS["utf8mb3"]


def described_type(
    column_type: str,
    charset: str | None,
    labels: Sequence[str] = (),
    forms: ValueForms = LABEL_FORMS,
) -> MysqlValueType:
    """Return how values of a column are read.

    Args:
        column_type: `COLUMN_TYPE`, such as `decimal(10,2) unsigned`.
        charset: `CHARACTER_SET_NAME`, None for types without one.
        labels: Those of an ENUM or SET.
        forms: How values look where there is a choice.

    Raises:
        UnsupportedEvent: The type, or its character set, is not known.
    """
    found = _TYPE.fullmatch(column_type.lower())
    assert found
    name, first, second, rest = found[1], int(found[2] or 0), int(found[3] or 0), found[4]
    mariadb = mariadb_type(name)
    if mariadb is not None:
        return mariadb
    collation = 63 if charset is None else _COLLATIONS.get(charset)
    if collation is None:
        raise UnsupportedEvent(f"text in the unknown character set {charset}")
    log_type = _log_type(name, first, second, CHARSETS[collation].width, len(labels))
    if log_type is None:
        raise UnsupportedEvent(f"type {name}")
    return value_type(log_type, collation, unsigned="unsigned" in rest.split(), forms=forms)


def _log_type(name: str, first: int, second: int, width: int, labels: int) -> LogType | None:  # noqa: C901, PLR0911, PLR0912 - one case per type
    if name in {"timestamp", "datetime", "time"}:
        return LogType(_CODES[name], first)
    if name in _CODES:
        return LogType(_CODES[name])
    if name == "decimal":
        return LogType(246, first, second)
    if name == "bit":
        return LogType(16, first % 8, first // 8)
    if name == "enum":
        return LogType(247, 1 if labels < 256 else 2)
    if name == "set":
        size = (labels + 7) // 8
        return LogType(248, size if size <= 4 else 8)
    if name in {"char", "binary"}:
        return LogType(254, first * width)
    if name in {"varchar", "varbinary"}:
        return LogType(15, first * width)
    if name == "json":
        return LogType(245, 4)
    if name == "vector":
        return LogType(242, 4)
    if name in GEOMETRIES:
        return LogType(255, 4)
    for ending in ("blob", "text"):
        if name.endswith(ending) and name.removesuffix(ending) in _BLOB_SIZES:
            return LogType(252, _BLOB_SIZES[name.removesuffix(ending)])
    return None
