"""`deltaforge bench decode`: measure the decoder alone, in rows per second.

It decodes from memory, on one core. The log is synthetic (`orders` of each source in `synthetic`:
inserts of six columns, 100 rows per transaction, 1,000 for MySQL), so the numbers show the speed of
the kernels, not of a server. They are measured in processor time, which other programs on the
machine affect less than wall-clock time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Annotated

import numpy as np
import typer

from deltaforge_dagster.sources.mysql import warm as mysql
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder
from deltaforge_dagster.sources.postgres import warm as postgres
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_lab.synthetic import mysql_events as mysql_samples
from deltaforge_lab.synthetic import mysql_type_families as mysql_families
from deltaforge_lab.synthetic import postgres_messages as postgres_samples
from deltaforge_lab.synthetic import postgres_type_families as postgres_families

BUFFER_BYTES = 4 << 20


class LogKind(StrEnum):
    """A kind of log that a decoder exists for."""

    POSTGRES = "postgres"
    MYSQL = "mysql"


def decode(
    source: Annotated[LogKind, typer.Option(help="Kind of log to decode.")] = LogKind.POSTGRES,
    rows: Annotated[int, typer.Option(help="Number of rows to decode.", min=1)] = 500_000,
    families: Annotated[
        bool,
        typer.Option(help="Measure each type family separately, in rows of a key and ten columns."),
    ] = False,
) -> None:
    """Measure decoding a synthetic log from memory on one core; print a JSON object per line."""
    for family in _FAMILIES[source] if families else (None,):
        named = {} if family is None else {"family": family}
        typer.echo(json.dumps(named | bench_decode(source, rows, family=family)))


def bench_decode(
    source: LogKind = LogKind.POSTGRES,
    rows: int = 500_000,
    repeats: int = 3,
    family: str | None = None,
) -> dict[str, float]:
    """Decode `rows` rows `repeats` times in read buffers of 4 MiB and return the best result.

    The rows are ordinary ones, or those of one type family.

    Returns:
        `rows`; `rows_per_second` and `megabytes_per_second` (of log) on one core; `times_copy`: how
        many
        times longer decoding takes than copying the same bytes; `log_bytes_per_row`.
    """
    decoder, samples = _DECODERS[source]
    log = samples.orders(rows) if family is None else _FAMILIES[source][family](rows)
    stream = np.frombuffer(log, np.uint8)
    decoder.warm()
    copying = min(_seconds_to_copy(stream) for _ in range(repeats))
    decoding = min(_seconds_to_decode(decoder.detached_decoder(), stream) for _ in range(repeats))
    return {
        "rows": rows,
        "log_bytes_per_row": stream.size / rows,
        "rows_per_second": rows / decoding,
        "megabytes_per_second": stream.size / decoding / 1e6,
        "times_copy": decoding / copying,
    }


def _seconds_to_copy(stream: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    target = np.zeros_like(stream)  # written to, so that all its pages are allocated
    begun = time.process_time()
    for at in range(0, stream.size, BUFFER_BYTES):
        target[at : at + BUFFER_BYTES] = stream[at : at + BUFFER_BYTES]
    return time.process_time() - begun


def _seconds_to_decode(
    decoder: PostgresDecoder | MysqlDecoder, stream: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> float:
    begun = time.process_time()
    at = 0
    while at < stream.size:
        buffer = stream[at : at + BUFFER_BYTES]
        at += decoder.feed(buffer, buffer.size).consumed
    return time.process_time() - begun


_DECODERS = {LogKind.POSTGRES: (postgres, postgres_samples), LogKind.MYSQL: (mysql, mysql_samples)}
_FAMILIES: dict[LogKind, dict[str, Callable[[int], bytes]]] = {
    LogKind.POSTGRES: {
        name: partial(postgres_families.stream, name) for name in postgres_families.NAMES
    },
    LogKind.MYSQL: {name: partial(mysql_families.stream, name) for name in mysql_families.NAMES},
}
