"""Names in SQL, and which names PostgreSQL cannot have."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAME_BYTES = 63
"""The server cuts longer names (NAMEDATALEN - 1)."""

_SYSTEM = {"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"}

DEFAULT_SCHEMA = "public"
"""The schema of a table whose name has none."""


def quoted(*names: str) -> str:
    """Return a name of these parts, quoted."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def literal(value: str) -> str:
    """Return a string literal."""
    escaped = value.replace("'", "''")
    return f"E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in value else f"'{escaped}'"


def schema_and_table(destination: Sequence[str]) -> tuple[str, str]:
    """Return the schema and the name of a table; a name without a schema is in `public`."""
    *schema, table = destination
    return (schema[0] if schema else DEFAULT_SCHEMA), table


def bad_name(name: str) -> str | None:
    """Return why the name of a column, table or schema is impossible, None if it is possible."""
    size = len(name.encode())
    if size > MAX_NAME_BYTES:
        return f"it has {size} bytes, and PostgreSQL's names have at most {MAX_NAME_BYTES}"
    return None


def bad_column(name: str) -> str | None:
    """Return why a table cannot have a column of that name, None if it can."""
    if name in _SYSTEM:
        return "PostgreSQL has a system column of that name in every table"
    return bad_name(name)
