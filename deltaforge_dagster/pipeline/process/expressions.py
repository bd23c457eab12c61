"""The `sql` processor: Spark evaluates the SQL expressions of a pipeline file on rows in transit.

An expression sees the row's columns (`transit.READABLE`); columns that hold JSON are VARIANTs.
Spark analyses all expressions once, before the first row. Errors name the processor and the field
of the file; expressions of a type that cannot be used are refused then, too.

Notes, which travel between the rows (`transit`), pass unchanged. If `where` is not true for a row,
no other expression is evaluated for it, so `where` guards expressions that would fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql.types import (
    ArrayType,
    AtomicType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    LongType,
    MapType,
    NullType,
    NumericType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from deltaforge_dagster.config.processors import SqlProcessor
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.pipeline.spark_client import functions as sql
from deltaforge_dagster.processors.sql import (
    JSON_COLUMNS,
    NOTE,
    PACKED,
    READABLE,
    columns_read,
    json_column,
    transit_schema,
    value_column,
)

_SCALARS = (
    BinaryType, BooleanType, DateType, NullType, NumericType, StringType, TimestampNTZType,
    TimestampType,
)  # fmt: skip
_DATA_EXCEPTION = "22"
_RAISED = "P0001"
"""SQLSTATE class and code of errors caused by a row's value (Spark manual, "Error Conditions")."""


@dataclass(frozen=True, slots=True)
class SqlQuery:
    """A `sql` processor that Spark accepts.

    Attributes:
        processor: The block of the file.
        variants: Fields of the block whose expressions have the type VARIANT.
    """

    processor: SqlProcessor
    variants: frozenset[str]

    def over(self, frame: DataFrame) -> DataFrame:
        """Return rows in transit with the results of the expressions as additional columns."""
        processor = self.processor
        rows = _readable(frame, processor)
        row = sql.col(NOTE).isNull()
        computed = dict(processor.computed)
        columns = []
        if (where := computed.pop("where", None)) is not None:
            # Selected first, so that it is evaluated once per row: it may be random.
            name = value_column(processor, "where")
            rows = rows.select("*", sql.when(row, sql.expr(where)).alias(name))
            row = sql.col(name)
            columns.append(row)
        for field, text in computed.items():
            column = sql.when(row, sql.expr(text))
            if field in self.variants:
                columns.append(sql.to_json(column).alias(json_column(processor, field)))
            else:
                column = column.cast("string") if field.startswith("route.") else column
                columns.append(column.alias(value_column(processor, field)))
        return rows.select(PACKED, NOTE, *columns)


def analysed(session: SparkSession, processor: SqlProcessor) -> SqlQuery:
    """Have Spark analyse the expressions of a processor.

    Raises:
        SpecError: Spark refuses an expression, or an expression has a type that cannot be used.
        PySparkException: No server answers.
    """
    rows = _readable(
        session.createDataFrame([], spark_schema(transit_schema(columns_read(processor)))),
        processor,
    )
    types = _types(rows, processor)
    variants = set()
    for field, kind in types.items():
        if field == "where":
            _check(processor, field, kind, isinstance(kind, BooleanType), "must be true or false")
        elif field.startswith("route."):
            _check(
                processor,
                field,
                kind,
                isinstance(kind, AtomicType | NullType | VariantType),
                "must be text",
            )
        elif isinstance(kind, VariantType):
            variants.add(field)
        else:
            _check(processor, field, kind, _has_json_form(kind), "has no JSON form (cast it)")
    return SqlQuery(processor, frozenset(variants))


def is_of_a_row(error: PySparkException) -> bool:
    """Return whether a row's value made an expression fail."""
    state = error.getSqlState() or ""
    return state.startswith(_DATA_EXCEPTION) or state == _RAISED


def fragment(error: PySparkException) -> str:
    """Return the part of an expression that failed, quoted, if Spark names it.

    It contains no values.
    """
    texts = [context.fragment() for context in error.getQueryContext()]
    return f" in `{texts[0]}`" if texts else ""


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema for an Arrow schema of strings, binary columns and integers."""
    kinds: Mapping[pa.DataType, DataType] = {pa.int64(): LongType(), pa.binary(): BinaryType()}
    return StructType(
        [StructField(field.name, kinds.get(field.type, StringType())) for field in schema]
    )


def _readable(frame: DataFrame, processor: SqlProcessor) -> DataFrame:
    columns: list[Column] = [
        sql.parse_json(sql.col(name)).alias(name) if name in JSON_COLUMNS else sql.col(name)
        for name in columns_read(processor)
    ]
    return frame.select(*columns, PACKED, NOTE)


def _types(rows: DataFrame, processor: SqlProcessor) -> dict[str, DataType]:
    """Return the type of each expression."""
    expressions = processor.computed
    try:
        # Wrapped in `when`, as for evaluation: Spark refuses aggregates and generators there.
        columns = [sql.when(sql.lit(True), sql.expr(text)) for text in expressions.values()]
        fields = rows.select(sql.col(NOTE), *columns).schema.fields[1:]
    except AnalysisException:
        return {field: _type(rows, processor, field, text) for field, text in expressions.items()}
    return {field: typed.dataType for field, typed in zip(expressions, fields, strict=True)}


def _type(rows: DataFrame, processor: SqlProcessor, field: str, text: str) -> DataType:
    try:
        column = sql.when(sql.lit(True), sql.expr(text))
        return rows.select(sql.col(NOTE), column).schema.fields[1].dataType
    except AnalysisException as error:
        message = error.getMessage().strip().splitlines()[0].partition(" SQLSTATE:")[0]
        if (error.getCondition() or "").startswith("UNRESOLVED_COLUMN"):
            message = f"{message.partition(' Did you mean')[0]} There are {', '.join(READABLE)}."
        raise SpecError(
            f"processor {processor.id}: {field}: Spark refuses `{text}`: {message}"
        ) from None


def _check(processor: SqlProcessor, field: str, kind: DataType, good: bool, problem: str) -> None:
    if not good:
        raise SpecError(
            f"processor {processor.id}: {field}: {problem}, but `{processor.computed[field]}` is "
            f"{kind.simpleString()}"
        )


def _has_json_form(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_json_form(kind.elementType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and _has_json_form(kind.valueType)
    if isinstance(kind, StructType):
        return all(_has_json_form(field.dataType) for field in kind.fields)
    return isinstance(kind, _SCALARS)
