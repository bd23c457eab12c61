"""Types of SQLite's columns, by their affinity ("Datatypes In SQLite", section 3.1).

A column with another affinity than INTEGER, REAL, TEXT and BLOB (NUMERIC: `DECIMAL(10,2)`,
`BOOLEAN`, `DATE`) and one without a type hold values of several types, so they are text.
"""

from __future__ import annotations

from dataclasses import replace

from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.value_types import ValueType

_BYTES = replace(types.BINARY, form="text")
_AFFINITIES = (
    (("INT",), types.INT64),
    (("CHAR", "CLOB", "TEXT"), types.TEXT),
    (("BLOB",), _BYTES),
    (("REAL", "FLOA", "DOUB"), types.FLOAT64),
)
"""In SQLite's order: the first whose words are in the declared type."""


def value_type(data_type: str) -> ValueType:
    """Return the type of the values in a column of a declared type."""
    upper = data_type.upper()
    return next(
        (type_ for words, type_ in _AFFINITIES if any(word in upper for word in words)), types.TEXT
    )
