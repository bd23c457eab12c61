"""`deltaforge bench typed`: measure how fast row images become Arrow tables with types.

The measurement is on one core, from memory. The rows have the columns of `orders6`, as each
source's decoder writes them of a synthetic log (`bench decode`). Only `typed_rows` is measured, in
processor time, which other programs on the machine affect less than wall-clock time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Annotated, TypeAlias, cast

import numpy as np
import pyarrow as pa
import typer

from deltaforge_dagster.config.engine import Engine
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import SchemaRegistry
from deltaforge_dagster.sources.mysql import warm as mysql
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.postgres import warm as postgres
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.tables import SchemaStamp, TableSchema
from deltaforge_dagster.typed_rows.rows import typed_rows
from deltaforge_dagster.typed_rows.schema import TypedSchema, typed_schema
from deltaforge_lab.bench.decode import BUFFER_BYTES, LogKind
from deltaforge_lab.synthetic import mysql_events as mysql_samples
from deltaforge_lab.synthetic import postgres_messages as postgres_samples

_Decoder: TypeAlias = PostgresDecoder | MysqlDecoder
_SOURCES: Mapping[LogKind, tuple[Callable[[SchemaRegistry], _Decoder], Callable[[int], bytes]]] = {
    LogKind.POSTGRES: (postgres.detached_decoder, postgres_samples.orders),
    LogKind.MYSQL: (mysql.detached_decoder, mysql_samples.orders),
}


class TableVersions:
    """A registry that remembers the table versions of one log."""

    def __init__(self) -> None:
        self.tables: list[TableSchema] = []

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Remember the version."""
        del position
        self.tables.append(table)
        return SchemaStamp(f"sha256:{len(self.tables)}", 1, len(self.tables))


def typed(
    source: Annotated[
        LogKind, typer.Option(help="Kind of source that the rows are of.")
    ] = LogKind.POSTGRES,
    rows: Annotated[int, typer.Option(help="Number of rows.", min=1)] = 500_000,
) -> None:
    """Measure turning row images (`orders6`, six columns) into typed Arrow tables on one core."""
    typer.echo(json.dumps(bench_typed(source, rows)))


def bench_typed(source: LogKind, rows: int = 500_000, repeats: int = 5) -> dict[str, float]:
    """Turn `rows` row images into typed rows `repeats` times and return the best result.

    Returns:
        `rows`; `columns`; `rows_per_second` and `megabytes_per_second` (of JSON) on one core;
        `cpu_seconds_per_million` rows; `json_bytes_per_row`.
    """
    schema, images = _images(source, rows)
    typed_rows(images[0], schema)  # compiles the kernels
    seconds = min(_seconds(images, schema) for _ in range(repeats))
    size = sum(image.nbytes for image in images)
    return {
        "rows": rows,
        "columns": len(schema.columns),
        "json_bytes_per_row": size / rows,
        "rows_per_second": rows / seconds,
        "megabytes_per_second": size / seconds / 1e6,
        "cpu_seconds_per_million": seconds / rows * 1e6,
    }


def _images(source: LogKind, rows: int) -> tuple[TypedSchema, list[pa.StringArray]]:
    """Return the columns of the table, and the images of its rows in the decoder's batches."""
    detached_decoder, orders = _SOURCES[source]
    versions = TableVersions()
    decoder = detached_decoder(versions)
    stream = np.frombuffer(orders(rows), np.uint8)
    images: list[pa.StringArray] = []
    at = 0
    while at < stream.size:
        buffer = stream[at : at + BUFFER_BYTES]
        decoded = decoder.feed(buffer, buffer.size)
        at += decoded.consumed
        rows_of = (batch.rows for batch in decoded.batches if batch.rows is not None)
        images += [cast("pa.StringArray", frame.column("after").drop_null()) for frame in rows_of]
    return typed_schema(versions.tables[-1], source_types()[source], Engine()), images


def _seconds(images: list[pa.StringArray], schema: TypedSchema) -> float:
    begun = time.process_time()
    for image in images:
        typed_rows(image, schema)
    return time.process_time() - begun
