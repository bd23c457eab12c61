"""The replication stream against a real server: bytes, status messages, ends."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.position import parse_lsn
from deltaforge_dagster.sources.postgres.stream.replication import ReplicationStream
from tests.e2e.deployment import eventually
from tests.sources.postgres.connection.test_server import silencing_proxy

pytestmark = pytest.mark.postgres


class Slot:
    """A table `t`, its publication and slot in a database, and streams of it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.name = f"s_{secrets.token_hex(6)}"
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        self.connection.execute("CREATE PUBLICATION p FOR TABLE t")
        self.connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (self.name,)
        )

    def open(self, *, status_seconds: float = 1.0, options: str = "") -> ReplicationStream:
        """Connect, and start nothing."""
        server = PostgresSourceServer.from_dsn(
            conninfo.make_conninfo(self.dsn, options=options), "deltaforge/t"
        )
        with server.query(5) as connection:
            return ReplicationStream(server.replicate(connection, 5), "here", status_seconds)

    def stream(self, *, status_seconds: float = 1.0, options: str = "") -> ReplicationStream:
        """Start to stream."""
        opened = self.open(status_seconds=status_seconds, options=options)
        opened.start(self.command)
        return opened

    @property
    def command(self) -> str:
        """The command that starts the stream."""
        return (
            f"START_REPLICATION SLOT {self.name} LOGICAL 0/0 "
            "(proto_version '1', publication_names 'p')"
        )

    def column(self, name: str) -> str | None:
        """Return a column of the slot, or of its walsender, as text."""
        row = self.connection.execute(
            f"SELECT {name}::text FROM pg_replication_slots"
            " LEFT JOIN pg_stat_replication ON active_pid = pid WHERE slot_name = %s",
            (self.name,),
        ).fetchone()
        return None if row is None else row[0]

    def wait_until_free(self) -> None:
        """Wait until nobody reads it."""
        eventually(lambda: self.column("active_pid") is None)

    def drop(self) -> None:
        """Drop the slot once nobody reads it."""
        with closing(self.connection):
            self.wait_until_free()
            self.connection.execute("SELECT pg_drop_replication_slot(%s)", (self.name,))


@pytest.fixture
def slot(postgres_dsn: str) -> Iterator[Slot]:
    """A slot with its table and publication."""
    made = Slot(postgres_dsn)
    yield made
    made.drop()


def receive(stream: ReplicationStream, until: bytes, seconds: float = 60) -> bytes:
    """Return everything received until `until` is in it."""
    buffer, received = bytearray(1 << 20), b""
    deadline = time.monotonic() + seconds
    while until not in received and time.monotonic() < deadline:
        with memoryview(buffer) as view:
            count = stream.receive(view, 0.05)
        received += bytes(buffer[:count])
    assert until in received
    return received


def test_a_change_arrives_at_once(slot: Slot) -> None:
    """A small transaction is handed over without waiting for the rest of `seconds`."""
    with closing(slot.stream()) as stream, memoryview(bytearray(1 << 20)) as buffer:
        while stream.receive(buffer, 0.2):
            pass
        slot.connection.execute("INSERT INTO t VALUES (1, 'first-value')")
        began = time.monotonic()

        received = b""
        while b"first-value" not in received:  # a keepalive may come before
            received += bytes(buffer[: stream.receive(buffer, 60.0)])

        assert time.monotonic() - began < 30


def test_much_log_arrives_in_big_pieces(slot: Slot) -> None:
    """A backlog fills the buffer instead of coming message by message."""
    slot.connection.execute(
        "INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 100000) n"
    )

    def size_of_pieces() -> float:
        sizes: list[int] = []
        with closing(slot.stream()) as stream, memoryview(bytearray(4 << 20)) as buffer:
            while sum(sizes) < 13_000_000:
                sizes.append(stream.receive(buffer, 0.05))
        slot.wait_until_free()
        return sum(sizes) / len([size for size in sizes if size])

    # A server that is not let run sends little, so the log is sent again.
    eventually(lambda: size_of_pieces() > 100_000)


def test_status_goes_out_while_nobody_receives(slot: Slot) -> None:
    """A reader that is busy for longer than wal_sender_timeout keeps its connection."""
    options = "-c wal_sender_timeout=4000"
    with closing(slot.stream(status_seconds=0.25, options=options)) as stream:
        pid = slot.column("active_pid")
        slot.connection.execute(
            "INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 100000) n"
        )
        time.sleep(5)
        slot.connection.execute("INSERT INTO t VALUES (0, 'the-end')")

        receive(stream, b"the-end")

        assert slot.column("active_pid") == pid


def test_the_server_forgets_what_was_confirmed_and_no_more(slot: Slot) -> None:
    """`flush` is the confirmed position, `write` the received one; a higher one is held back."""
    with closing(slot.stream(status_seconds=0.05)) as stream:
        before = slot.column("confirmed_flush_lsn")
        slot.connection.execute("INSERT INTO t VALUES (1, 'v')")
        row = slot.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        lsn = parse_lsn(row[0])
        slot.connection.execute("INSERT INTO t VALUES (2, 'second')")
        receive(stream, b"second")

        stream.confirm(lsn)
        time.sleep(0.3)
        assert slot.column("confirmed_flush_lsn") == before

        stream.passed(lsn)
        for name in ("confirmed_flush_lsn", "write_lsn"):
            eventually(lambda: parse_lsn(slot.column(name) or "") == lsn)  # noqa: B023 - called here


def test_the_last_confirmed_position_is_told_when_closing(slot: Slot) -> None:
    """A position confirmed a moment before the end is not lost."""
    stream = slot.stream(status_seconds=60)
    slot.connection.execute("INSERT INTO t VALUES (1, 'v')")
    row = slot.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    stream.passed(parse_lsn(row[0]))
    stream.confirm(parse_lsn(row[0]))
    stream.close()
    slot.wait_until_free()

    assert parse_lsn(slot.column("confirmed_flush_lsn") or "") == parse_lsn(row[0])


def test_closing_ends_a_blocked_receive(slot: Slot) -> None:
    """`close` from another thread wakes a receive that would wait for a minute."""
    stream = slot.stream()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with memoryview(bytearray(1 << 20)) as buffer:
                while True:
                    stream.receive(buffer, 60)
        except SourceUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    stream.close()
    stream.close()
    thread.join(30)

    assert not thread.is_alive()
    assert time.monotonic() - began < 30
    assert "the stream was closed" in str(errors[0])


def test_a_cut_connection_is_retryable(slot: Slot) -> None:
    """The end of the server's process shows as SourceUnavailable, after what it sent."""
    with closing(slot.stream()) as stream:
        slot.connection.execute("SELECT pg_terminate_backend(%s)", (slot.column("active_pid"),))
        with pytest.raises(SourceUnavailable):
            receive(stream, b"never")


def test_a_refused_command_has_its_code(slot: Slot) -> None:
    """A slot in use is refused with SQLSTATE 55006 before anything streams."""
    with (
        closing(slot.stream()),
        closing(slot.open()) as second,
        pytest.raises(RefusedError) as caught,
    ):
        second.start(slot.command)

    assert caught.value.sqlstate == "55006"


def test_a_silent_server_is_asked_and_then_given_up(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-way through the silence the server is asked; one that answers stays."""
    monkeypatch.setattr(
        "deltaforge_dagster.sources.postgres.stream.replication.SILENCE_SECONDS", 3.0
    )
    with silencing_proxy(slot.dsn) as (slot.dsn, silence):
        options = "-c wal_sender_timeout=0"  # sends no keepalives by itself
        with closing(slot.stream(status_seconds=60, options=options)) as stream:
            with memoryview(bytearray(1 << 20)) as buffer:
                deadline = time.monotonic() + 4
                while time.monotonic() < deadline:
                    stream.receive(buffer, 0.05)
            silence.set()

            with pytest.raises(SourceUnavailable, match="has said nothing for 3 s"):
                receive(stream, b"never")
