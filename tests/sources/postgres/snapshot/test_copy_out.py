"""What `COPY ... TO STDOUT` sends, taken from libpq by a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.postgres.snapshot import copy_out
from deltaforge_dagster.sources.postgres.snapshot.copy_out import FUNCTIONS, Functions
from deltaforge_lab.servers.postgres import PostgresServer
from tests.contracts.test_snapshot import snapshot_source
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres

WAYS = pytest.mark.parametrize("functions", [FUNCTIONS, None], ids=["kernel", "psycopg"])
LONG = 3 * copy_out.BUFFER_BYTES
ROWS = f"""
    SELECT n, CASE n % 5000 WHEN 7 THEN repeat('long ', {LONG // 5}) WHEN 8 THEN '' WHEN 9 THEN NULL
                            ELSE repeat(chr(8364) || E'\\t\\n\\\\', n % 40) END
      FROM generate_series(1, 12000) AS n
"""


@pytest.fixture
def connection(postgres_server: PostgresServer) -> Iterator[psycopg.Connection]:
    """A connection to a database of its own."""
    with psycopg.connect(postgres_server.create_database(), autocommit=True) as connected:
        yield connected


def copy(
    connection: psycopg.Connection, query: str, functions: Functions | None = FUNCTIONS
) -> Iterator[Bytes | bytes]:
    """Send a COPY of what a query yields."""
    return copy_out.buffers(
        connection, sql.SQL("COPY ({}) TO STDOUT").format(sql.SQL(query)), functions
    )


def by_psycopg(connection: psycopg.Connection, query: str) -> bytes:
    """Return what psycopg's own COPY yields."""
    with connection.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT") as lines:
        return b"".join(map(bytes, lines))


@WAYS
def test_buffers_are_what_the_server_sent(
    connection: psycopg.Connection, functions: Functions | None
) -> None:
    """Each buffer holds whole lines and ends with the one that reaches the size, also where a line is
    larger than that; together they are every byte. The connection is free again afterwards.
    """  # noqa: D205 - one sentence
    buffers = [bytes(buffer) for buffer in copy(connection, ROWS, functions)]

    assert b"".join(buffers) == by_psycopg(connection, ROWS)
    assert len(buffers) > 3
    for piece in buffers[:-1]:
        last = piece.rindex(b"\n", 0, -1) + 1
        assert piece.endswith(b"\n")
        assert last < copy_out.BUFFER_BYTES <= len(piece)
    assert connection.execute("SELECT 1").fetchone() == (1,)


@WAYS
def test_a_table_without_rows_has_no_pieces(
    connection: psycopg.Connection, functions: Functions | None
) -> None:
    """An answer without lines ends at once."""
    assert list(copy(connection, "SELECT 1 WHERE false", functions)) == []
    assert connection.execute("SELECT 1").fetchone() == (1,)


@WAYS
def test_an_error_behind_rows(connection: psycopg.Connection, functions: Functions | None) -> None:
    """It is raised as the server names it, never taken for the end; the connection goes on."""
    query = "SELECT 1 / (300000 - n) FROM generate_series(1, 300000) AS n"

    with pytest.raises(psycopg.errors.DivisionByZero):
        list(copy(connection, query, functions))
    assert connection.execute("SELECT 1").fetchone() == (1,)


@WAYS
def test_notices_between_rows(connection: psycopg.Connection, functions: Functions | None) -> None:
    """What the server says meanwhile reaches its handler, and no row is lost."""
    said: list[str | None] = []
    connection.add_notice_handler(lambda notice: said.append(notice.message_primary))
    connection.execute(
        "CREATE FUNCTION noisy(n int) RETURNS int LANGUAGE plpgsql AS"
        " $$BEGIN RAISE NOTICE 'row %', n; RETURN n; END$$"
    )
    query = "SELECT noisy(n) FROM generate_series(1, 3000) AS n"

    lines = b"".join(map(bytes, copy(connection, query, functions)))
    assert lines == b"".join(b"%d\n" % n for n in range(1, 3001))
    assert said == [f"row {n}" for n in range(1, 3001)]


@WAYS
def test_a_connection_closed_meanwhile(
    connection: psycopg.Connection, functions: Functions | None
) -> None:
    """The next buffer is an error of psycopg's, not a crash."""
    buffers = copy(connection, "SELECT repeat('x', 1000) FROM generate_series(1, 20000)", functions)
    next(buffers)
    connection.close()

    with pytest.raises(psycopg.OperationalError, match=r"closed|NULL"):
        next(buffers)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("pg_terminate_backend", "57P01|connection lost"),
        ("pg_cancel_backend", "57014"),
    ],
)
def test_a_chunk_that_is_cut_short_can_be_read_again(
    postgres_server: PostgresServer, what: str, said: str
) -> None:
    """Whatever ends the COPY, the reading is to be tried again, and the same reader then has every row."""
    with PostgresBench(postgres_server.create_database()) as bench:
        bench.execute(
            "INSERT INTO orders SELECT n, repeat('x', 900) FROM generate_series(1, 60000) n"
        )
        source = snapshot_source(bench)
        (chunk,) = source.snapshots().plan(["public.orders"], 1_000_000)
        watermark = source.snapshots().watermark()
        with source.snapshots().reader() as reader:
            batches = reader.read(chunk, watermark).batches
            first = next(batches).num_rows
            ended = bench.value(
                f"SELECT count({what}(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'COPY %%'"
            )
            assert (first < 60_000, ended) == (True, 1)
            with pytest.raises(SourceUnavailable, match=said):
                list(batches)
            again = reader.read(chunk, watermark).batches
            assert sum(batch.num_rows for batch in again) == 60_000


def test_the_kernel_takes_the_lines_here() -> None:
    """The functions of libpq are found beside psycopg, so what the tests above call "kernel" is one."""
    assert FUNCTIONS is not None
