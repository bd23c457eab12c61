"""The tables that benchmarks write: columns, and statements that generate rows in the server.

Row `n` is a function of `n` alone and is computed by the server, so writing takes no time in the
benchmark's process. One statement is one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TRANSACTION_ROWS = 1_000

Dialect = Literal["postgres", "mysql"]


@dataclass(frozen=True, slots=True)
class BenchColumn:
    """A column: its type, and its value in row `n` as SQL.

    The `mysql_` fields are set if MySQL differs.
    """

    name: str
    type: str
    value: str
    mysql_type: str | None = None
    mysql_value: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A table; its first column is the primary key."""

    name: str
    columns: tuple[BenchColumn, ...]

    def create_table(self, dialect: Dialect) -> str:
        """Return the statement that creates the table."""
        types = [
            f"{column.name} "
            f"{column.mysql_type or column.type if dialect == 'mysql' else column.type}"
            for column in self.columns
        ]
        key = self.columns[0].name
        return f"CREATE TABLE {self.name} ({', '.join(types)}, PRIMARY KEY ({key}))"

    def insert(self, dialect: Dialect, first: int, rows: int) -> str:
        """Return the statement that inserts rows `first` to `first + rows - 1`.

        In MySQL it reads a table `numbers(i)` that must have at least the rows 0 to `rows - 1`.
        """
        last = first + rows - 1
        if dialect == "postgres":
            values = ", ".join(column.value for column in self.columns)
            numbers = f"generate_series({first}::bigint, {last}) AS n"
        else:
            values = ", ".join(column.mysql_value or column.value for column in self.columns)
            numbers = f"(SELECT {first} + i AS n FROM numbers WHERE i < {rows}) AS numbered"  # noqa: S608
        return f"INSERT INTO {self.name} SELECT {values} FROM {numbers}"  # noqa: S608 - numbers


_CREATED = BenchColumn(
    "created_at",
    "timestamp",
    "timestamp '2025-01-02 03:04:05' + n * interval '1000001 microseconds'",
    "timestamp(6) NOT NULL",
    "timestamp '2025-01-02 03:04:05' + INTERVAL n * 1000001 MICROSECOND",
)
_STATUS = "CASE n % 4 WHEN 0 THEN 'new' WHEN 1 THEN 'paid' WHEN 2 THEN 'packed' ELSE 'sent' END"

_BY_POST = ", by post, to the address of the invoice before the last one"

ORDERS6 = Shape(
    "orders6",
    (
        BenchColumn("id", "bigint", "n"),
        BenchColumn("customer", "text", "concat('customer ', n * 7919 % 100003)", "varchar(100)"),
        BenchColumn("amount", "decimal(10,2)", "n % 99991 / 100.0"),
        BenchColumn("status", "text", _STATUS, "varchar(20)"),
        _CREATED,
        BenchColumn("note", "text", "concat('note on order ', n, ': ', n * 104729 % 1000003)"),
    ),
)
"""Six columns, about 130 bytes of JSON."""

WIDE10 = Shape(
    "wide10",
    (
        BenchColumn("id", "bigint", "n"),
        BenchColumn("customer_id", "bigint", "n * 7919 % 100003"),
        BenchColumn("status", "text", _STATUS, "varchar(20)"),
        BenchColumn("amount", "decimal(12,2)", "n % 99991 / 100.0"),
        BenchColumn("currency", "char(3)", "'EUR'"),
        BenchColumn(
            "note", "text", f"concat('order ', n * 104729 % 1000003, ' of ', n, '{_BY_POST}')"
        ),
        BenchColumn("paid", "boolean", "n % 3 > 0"),
        BenchColumn("items", "int", "n % 7"),
        _CREATED,
        BenchColumn("sku", "text", "concat('SKU-', n * 31 % 5000)", "varchar(40)"),
    ),
)
"""Ten columns, about 260 bytes of JSON."""

DOCUMENTS3 = Shape(
    "documents3",
    (
        BenchColumn("id", "bigint", "n"),
        BenchColumn("kind", "text", _STATUS, "varchar(20)"),
        BenchColumn(
            "document",
            "jsonb",
            "jsonb_build_object('customer', n * 7919 % 100003, 'status', "
            f"{_STATUS}, 'lines', jsonb_build_array(jsonb_build_object('sku', "
            "concat('SKU-', n * 31 % 5000), 'count', n % 7)))",
            "json",
            f"JSON_OBJECT('customer', n * 7919 % 100003, 'status', {_STATUS}, 'lines', "
            "JSON_ARRAY(JSON_OBJECT('sku', concat('SKU-', n * 31 % 5000), 'count', n % 7)))",
        ),
    ),
)
"""Three columns, one of them a document with an array; about 110 bytes of JSON."""

SHAPES = {shape.name: shape for shape in (ORDERS6, WIDE10, DOCUMENTS3)}
