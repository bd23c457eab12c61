"""What may differ by documentation: each with its reason, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.oracle.kinds import UNCHANGED, Kind, Value

_TOAST = 1900
"""Values of fewer bytes are never stored outside of a PostgreSQL row."""

HOLDS: Mapping[str, str] = {
    r"outside of 19\d\d|1900|2299|ClickHouse holds dates": "clickhouse.md: a date or timestamp outside of 1900 to 2299",
    r"does not fit its type (date|timestamp|timestamptz)\b": (
        "typed-rows.md: zero dates of MySQL, which a column without a default has in older rows"
    ),
    r"an insert lacks [0-9a-f]{32} ": "mysql.md: the column of an index of an expression on MySQL 8.0.15",
    r"an insert lacks .* \(binlog_row_image\), and the default that the row has there is not certain": (
        "mysql.md: an insert that is read after its table was altered"
    ),
    r"array.* null|null.* array|no null for arrays": "clickhouse.md: an array that is null",
    r"no type holds the values of both|does not hold|cannot become|another type|other type|resync.*type|type.*resync": (
        "tables.md: a column gets a type that the table's cannot become"
    ),
}
"""Reasons for which a table may be held, as patterns of the text, and where they are documented."""


def documented_hold(text: str) -> str | None:
    """Return why a table may be held, None if it may not."""
    return next((why for pattern, why in HOLDS.items() if re.search(pattern, text)), None)


@dataclass(frozen=True, slots=True)
class Excuses:
    """What may differ in a scenario.

    Attributes:
        whole_images: Whether the log has every column of each change.
        toast: Whether the source leaves unchanged large values out.
    """

    whole_images: bool
    toast: bool

    def allow(self, reader: str, kind: Kind, wanted: Value, found: Value) -> bool:
        """Return whether documentation allows this difference of a value.

        - events.md, types.md: messages do not tell the JSON document null from null, and the document
          `{"_unchanged":true}` from the mark.
        - tables.md: what a change of a changelog does not have (unchanged TOAST, columns
          that are not in MySQL's row image) is null there.
        - clickhouse.md: arrays are never null, so that an added one is empty in older rows.
        """
        if reader == "messages":
            return _without_nulls(kind, wanted) == found or (
                kind.name == "json" and wanted == UNCHANGED
            )
        if reader.startswith("clickhouse") and (wanted, found) == (None, ()):
            return True
        if "changelog" not in reader or found not in (None, ()):
            return False
        large = isinstance(wanted, str | bytes) and len(wanted) > _TOAST
        return not self.whole_images or (self.toast and large)


def _without_nulls(kind: Kind, value: Value) -> Value:
    """Return a value with null in place of the document."""
    if isinstance(value, tuple) and kind.element is not None:
        return tuple(_without_nulls(kind.element, one) for one in value)
    return None if kind.name == "json" and value == "null" else value
