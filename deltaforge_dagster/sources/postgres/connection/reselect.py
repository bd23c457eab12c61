"""Read TOAST values that the log lacks from the current rows: `engine.values.toast: reselect`.

There is one transaction for each table and batch of changes. It takes the lightest lock, checks
that the table's columns still are as the log describes them, and copies the rows with the batch's
keys. The values are the current ones, perhaps newer than the change; a deleted row has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import PermissionMissing
from deltaforge_dagster.sources.findings import one_line
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.server import (
    KeptConnection,
    PostgresSourceServer,
)
from deltaforge_dagster.sources.postgres.decode.toast_reselect import Answer, Question
from deltaforge_dagster.tables import Column

_SECONDS = 60.0
_ANSWER_BYTES = 16 << 20
"""An answer ends with the row with which it reaches this size."""


class Reselection:
    """Reads the current rows with given keys; implements `toast_reselect.Reselect`."""

    def __init__(self, server: PostgresSourceServer) -> None:
        self._server = server
        self._connection = KeptConnection(server, _SECONDS)

    def close(self) -> None:
        """Close the connection, which all questions share."""
        self._connection.close()

    def answer(self, question: Question) -> Answer:
        """Return the rows' current values; if they are large, only those of the first rows.

        Raises:
            PermissionMissing: The role may not read the table; the message has the grant.
            DeltaforgeError: As `refusals` translates any other error of the server.
        """
        with self._connection.question() as connection:
            try:
                return self._answer(connection, question)
            except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
                return _empty_answer(question)  # the table was altered at this moment
            except psycopg.errors.InsufficientPrivilege as error:
                table = sql.Identifier(question.table.schema or "", question.table.table)
                name = table.as_string(connection)
                raise PermissionMissing(
                    f"{self._server.where}: role {self._server.user!r} may not read {name}, which "
                    f"engine.values.toast: reselect needs ({one_line(str(error))})",
                    remedy=f'GRANT SELECT ON {name} TO "{self._server.user}"',
                ) from error

    def _answer(self, connection: psycopg.Connection, question: Question) -> Answer:
        qualified = catalog.named(connection, question.relation)
        if qualified is None:
            return _empty_answer(question)
        name = sql.Identifier(*qualified)
        # Locks the table, so that its columns do not change until the end of the transaction.
        connection.execute(sql.SQL("SELECT FROM ONLY {} LIMIT 0").format(name))
        table = catalog.columns_now(connection, question.relation, *qualified)
        columns = tuple(c for c in question.columns if _current_column(table, c) is not None)
        keys = [_current_column(table, column) for column, _ in question.keys]
        if not columns or None in keys:
            return _empty_answer(question)
        only = sql.SQL("") if table.partitioned else sql.SQL("ONLY ")
        query = _query(only + name, columns, [key for key in keys if key], question)
        copied, size = [], 0
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            for line in copy:
                copied.append(bytes(line))
                size += len(line)
                if size >= _ANSWER_BYTES:
                    break
        asked = question.rows
        if size >= _ANSWER_BYTES:
            asked = int(copied[-1].split(b"\t", 1)[0]) + 1
        return Answer(columns, b"".join(copied), asked)


def _current_column(table: catalog.ColumnsNow, column: Column) -> catalog.ColumnNow | None:
    """Return the current column; None if it was dropped or has another type."""
    current = table.columns.get(column.name)
    return current if current is not None and current.type_oid == column.type_oid else None


def _empty_answer(question: Question) -> Answer:
    return Answer((), b"", question.rows)


def _query(
    table: sql.Composed,
    columns: Sequence[Column],
    keys: Sequence[catalog.ColumnNow],
    question: Question,
) -> sql.Composed:
    """Return the COPY statement for the question's rows, in order, each with its number from 0."""
    names = [sql.Identifier(f"k{index}") for index in range(len(keys))]
    return sql.SQL(
        "COPY (SELECT asked.number - 1, {columns} FROM unnest({texts}) WITH ORDINALITY"
        " AS asked ({names}, number) JOIN {table} AS now ON {same}"
        " ORDER BY asked.number) TO STDOUT"
    ).format(
        columns=sql.SQL(", ").join(sql.Identifier("now", column.name) for column in columns),
        texts=sql.SQL(", ").join(
            sql.SQL("{}::text[]").format(sql.Literal(texts)) for _, texts in question.keys
        ),
        names=sql.SQL(", ").join(names),
        table=table,
        same=sql.SQL(" AND ").join(
            sql.SQL("{} OPERATOR({}.=) asked.{}::{}").format(
                sql.Identifier("now", key.name),
                sql.Identifier(key.operators),
                name,
                sql.SQL(key.type_name),  # from the catalog, quoted there
            )
            for key, name in zip(keys, names, strict=True)
        ),
    )
