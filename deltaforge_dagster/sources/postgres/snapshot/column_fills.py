"""The values that older rows of a table have in a column that was added (`Column.fill`).

`ADD COLUMN ... DEFAULT constant` does not touch the rows: the catalog keeps the value
(`pg_attribute.attmissingval`, since PostgreSQL 11) until the rows are rewritten (`VACUUM FULL`,
`ALTER TYPE`), even if the default is changed later. With a default that differs from row to row,
the server rewrites the rows at once, and the values are in the rows only.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg
from psycopg import sql

from deltaforge_dagster.sources.postgres.connection.catalog import Connect
from deltaforge_dagster.sources.postgres.decode.types import PostgresValueType
from deltaforge_dagster.sources.postgres.snapshot.selected import PostgresSelectedRows

_SECONDS = 10.0
_KEPT_VERSION = 110000  # before 11 ADD COLUMN ... DEFAULT rewrites all rows

_PROPERTIES = """
    SELECT a.attnum, a.atthasmissing, format_type(a.atttypid, a.atttypmod),
           NOT a.atthasdef AND NOT a.attnotnull AND a.attidentity = '' AND a.attgenerated = ''
               AND t.typdefault IS NULL AND NOT t.typnotnull
      FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     WHERE a.attrelid = %s AND a.attnum = ANY (%s) AND NOT a.attisdropped
"""

# The value is the only element of an array of the column's type. If that type is an array, too, the
# text of the outer array has the inner one quoted.
_VALUE = """
    COPY (SELECT ((attmissingval::text::text[])[1])::{type} FROM pg_attribute
          WHERE attrelid = {oid} AND attnum = {number}) TO STDOUT
"""


class CatalogFills:
    """Queries the catalog for the fills of columns.

    Args:
        connect: Opens a connection.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    def of(
        self, oid: int, types: Mapping[int, PostgresValueType], *, rewritten: bool | None
    ) -> dict[int, str | None]:
        """Return the fills of columns, by number; see `column_fills`."""
        with self._connect(_SECONDS) as connection:
            return column_fills(connection, oid, types, rewritten=rewritten)


def column_fills(
    connection: psycopg.Connection,
    oid: int,
    types: Mapping[int, PostgresValueType],
    *,
    rewritten: bool | None,
) -> dict[int, str | None]:
    """Return the fills of columns, by number; None for those that the catalog does not know.

    Args:
        connection: A connection to the server.
        oid: OID of the table.
        types: The columns, by number.
        rewritten: Whether the table's rows were rewritten since the table was last described,
            without these columns; None if that is not known.
    """
    fills: dict[int, str | None] = dict.fromkeys(types)
    if connection.info.server_version < _KEPT_VERSION:
        return fills
    for number, has_value, type_, is_bare in connection.execute(
        _PROPERTIES, (oid, list(types))
    ).fetchall():
        if has_value:
            fills[number] = _value(connection, oid, number, type_, types[number])
        elif rewritten is False or (rewritten is None and is_bare):
            fills[number] = "null"
    return fills


def _value(
    connection: psycopg.Connection, oid: int, number: int, type_: str, value_type: PostgresValueType
) -> str:
    query = sql.SQL(_VALUE).format(
        type=sql.SQL(type_),  # as the catalog spells it
        oid=sql.Literal(oid),
        number=sql.Literal(number),
    )
    with connection.cursor() as cursor, cursor.copy(query) as copy:
        line = b"".join(bytes(part) for part in copy)
    images, _ = PostgresSelectedRows({"c": value_type}).write(line)
    image: str = images[0].as_py()
    return image.removeprefix('{"c":').removesuffix("}")
