"""`deltaforge bench decode`: the decoder alone, rows of log a second, on one core, from memory.

The stream is made up (`samples.orders` of each source: inserts of six columns, 100 or, for MySQL,
1,000 a transaction), so the numbers say what the kernels can do, not what a server sends. They are
measured in processor time, which other programs on the machine disturb less than the clock.
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

from deltaforge_dagster.sources.mysql import samples as mysql_samples
from deltaforge_dagster.sources.mysql import synthetic_log as mysql
from deltaforge_dagster.sources.mysql import type_families as mysql_families
from deltaforge_dagster.sources.mysql.decoder import Decoder as MysqlDecoder
from deltaforge_dagster.sources.postgres import samples as postgres_samples
from deltaforge_dagster.sources.postgres import synthetic_log as postgres
from deltaforge_dagster.sources.postgres import type_families as postgres_families
from deltaforge_dagster.sources.postgres.decoder import Decoder as PostgresDecoder

PIECE = 4 << 20


class Log(StrEnum):
    """A kind of log that there is a decoder for."""

    POSTGRES = "postgres"
    MYSQL = "mysql"


def decode(
    source: Annotated[Log, typer.Option(help="Whose log.")] = Log.POSTGRES,
    rows: Annotated[int, typer.Option(help="Rows to decode.", min=1)] = 500_000,
    families: Annotated[
        bool, typer.Option(help="Each family of types by itself, in rows of a key and ten columns.")
    ] = False,
) -> None:
    """Decode a synthetic log from memory on one core; every line is a JSON object."""
    for family in _FAMILIES[source] if families else (None,):
        named = {} if family is None else {"family": family}
        typer.echo(json.dumps(named | bench_decode(source, rows, family=family)))


def bench_decode(
    source: Log = Log.POSTGRES, rows: int = 500_000, repeats: int = 3, family: str | None = None
) -> dict[str, float]:
    """Decode `rows` rows `repeats` times in pieces of 4 MiB and return the best of them.

    The rows are ordinary ones, or those of a family of types.

    Returns:
        `rows_per_second` and `megabytes_per_second` (of log) of one core; `times_copy`: how many
        times longer decoding takes than copying the same bytes; `log_bytes_per_row`.
    """
    decoder, samples = _DECODERS[source]
    made = samples.orders(rows) if family is None else _FAMILIES[source][family](rows)
    stream = np.frombuffer(made, np.uint8)
    decoder.warm()
    copying = min(_seconds_to_copy(stream) for _ in range(repeats))
    decoding = min(_seconds_to_decode(decoder.synthetic_decoder(), stream) for _ in range(repeats))
    return {
        "rows": rows,
        "log_bytes_per_row": stream.size / rows,
        "rows_per_second": rows / decoding,
        "megabytes_per_second": stream.size / decoding / 1e6,
        "times_copy": decoding / copying,
    }


def _seconds_to_copy(stream: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    target = np.zeros_like(stream)  # written once, so that no page is missing
    begun = time.process_time()
    for at in range(0, stream.size, PIECE):
        target[at : at + PIECE] = stream[at : at + PIECE]
    return time.process_time() - begun


def _seconds_to_decode(
    decoder: PostgresDecoder | MysqlDecoder, stream: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> float:
    begun = time.process_time()
    at = 0
    while at < stream.size:
        piece = stream[at : at + PIECE]
        at += decoder.feed(piece, piece.size).consumed
    return time.process_time() - begun


_DECODERS = {Log.POSTGRES: (postgres, postgres_samples), Log.MYSQL: (mysql, mysql_samples)}
_FAMILIES: dict[Log, dict[str, Callable[[int], bytes]]] = {
    Log.POSTGRES: {
        name: partial(postgres_families.stream, name) for name in postgres_families.NAMES
    },
    Log.MYSQL: {name: partial(mysql_families.stream, name) for name in mysql_families.NAMES},
}
