"""Databases on servers: one transaction per session, every value as it is, every refusal by its name.

The server is our own, written by Hrana's specification; `test_sqld` tries the same on libSQL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.turso.connection import HranaDatabase, Value
from tests.sources.turso.bench import SqliteBench
from tests.sources.turso.hrana_server import TOKEN, HranaServer, serving
from tests.sources.turso.served import check_a_pipelines_life


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SqliteBench]:
    """The file behind the server."""
    with SqliteBench(tmp_path / "shop.db") as made:
        yield made


@pytest.fixture
def server(bench: SqliteBench) -> Iterator[HranaServer]:
    """A server."""
    with serving(bench.path) as made:
        yield made


@pytest.fixture
def database(server: HranaServer) -> Iterator[HranaDatabase]:
    """A client of it."""
    made = HranaDatabase(server.url, TOKEN)
    yield made
    made.close()


VALUES: list[Value] = [None, 0, -(1 << 63), (1 << 63) - 1, 0.1, -1e300, "", "é\0", b"", b"\x00\xff", b"abcd"]  # fmt: skip


def test_values_go_both_ways(database: HranaDatabase) -> None:
    """Integers beyond doubles, empty and odd blobs, text with NUL."""
    with database.session(5) as session:
        ((*found,),) = session.query(f"SELECT {', '.join('?' * len(VALUES))}", VALUES)

    assert list(map(repr, found)) == list(map(repr, VALUES))


def test_a_session_is_one_transaction(
    database: HranaDatabase, server: HranaServer, bench: SqliteBench
) -> None:
    """It sees one moment, is committed at its end, undone by an error, and leaves no stream open."""
    with database.session(5) as session:
        assert session.query("SELECT count(*) FROM orders") == [[0]]
        bench.execute("INSERT INTO orders VALUES (1, 'a')")
        assert session.query("SELECT count(*) FROM orders") == [[0]]
    with database.session(5, write=True) as session:
        session.query("INSERT INTO orders VALUES (2, 'b')")
    with database.session(5, write=True) as session:
        with pytest.raises(SourceMisconfigured, match="no such table: nowhere"):
            session.query("SELECT * FROM nowhere")
        session.query("ROLLBACK")
        session.query("BEGIN")
    with pytest.raises(ZeroDivisionError):
        _write_and_fail(database)

    assert bench.rows("SELECT id FROM orders") == [(1,), (2,)]
    assert server.streams == {}


def _write_and_fail(database: HranaDatabase) -> None:
    with database.session(5, write=True) as session:
        session.query("INSERT INTO orders VALUES (3, 'c')")
        raise ZeroDivisionError


def test_a_pipelines_life(server: HranaServer) -> None:
    """Triggers are made, changes read in order, confirmed ones deleted, tables read: as with a file."""
    check_a_pipelines_life(server.url, TOKEN)


def test_answers_that_are_too_large_are_asked_for_in_parts(
    server: HranaServer, bench: SqliteBench
) -> None:
    """A server that limits its answers gets questions for fewer rows, and nothing is left out."""
    server.most_rows = 30
    check_a_pipelines_life(server.url, TOKEN)
    assert bench.rows("SELECT count(*) FROM orders") == [(100,)]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AuthFailed),
        (403, AuthFailed),
        (404, SourceMisconfigured),
        (429, SourceUnavailable),
        (503, SourceUnavailable),
        (200, SourceMisconfigured),
    ],
)
def test_refusals(
    database: HranaDatabase, server: HranaServer, status: int, error: type[DeltaforgeError]
) -> None:
    """What may pass is tried again; credentials and addresses are for people. No token is shown."""
    server.fails_with = status

    with pytest.raises(error) as caught, database.session(5):
        pass

    assert TOKEN not in str(caught.value)
    assert server.url in str(caught.value)


def test_a_server_that_is_not_there(server: HranaServer) -> None:
    """Nobody listening is a reason to wait, a lock is as well, a wrong token is not."""
    with pytest.raises(SourceUnavailable), HranaDatabase("http://127.0.0.1:1").session(1):
        pass
    with pytest.raises(AuthFailed), HranaDatabase(server.url, "wrong").session(1):
        pass
