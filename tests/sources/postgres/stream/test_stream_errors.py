"""A stream that the server refuses: what is lost, and what only has to wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltaforge_dagster.config.engine import PostgresOptions
from deltaforge_dagster.errors import DeltaforgeError, PositionLost, SourceUnavailable
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.stream import slots
from deltaforge_dagster.sources.postgres.stream.stream_errors import refusal
from deltaforge_dagster.testing.sources import LIMITS, Versions, insert, inserts, take, whole
from tests.faulty_proxy import FaultyProxy
from tests.fix_postgres import PostgresVersion, StartPostgres
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.messages import refusing

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def error_of(sqlstate: str, bench: PostgresBench) -> DeltaforgeError:
    """Return what an error of the server before the stream becomes."""
    server = PostgresSourceServer.from_dsn(bench.dsn, "deltaforge/test")
    return refusal(RefusedError(sqlstate, "no"), server, bench.config(), started=False)


def test_a_server_that_is_being_promoted_has_lost_nothing(bench: PostgresBench) -> None:
    """It refuses the slot with 55000, as Aurora's readers do until they are writers; then reading goes on."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    text = "replication slots cannot be used on RO (Read Only) node"
    asked: list[bytes] = []

    def promoted_at_the_third(data: bytes) -> bytes | None:
        if b"START_REPLICATION" not in data:
            return None
        asked.append(data)
        return refusing("55000", text) if len(asked) < 3 else None

    with FaultyProxy.answering(bench.dsn, promoted_at_the_third) as proxy:
        dsn = proxy.through(bench.dsn)
        for _ in range(2):
            with pytest.raises(SourceUnavailable, match="cannot be read now") as caught:
                next(bench.source(dsn=dsn).read(start, LIMITS, Versions()))
            assert text in str(caught.value)
        taken = take(bench, start, whole(1), source=bench.source(dsn=dsn))

    assert taken.changes == inserts("orders", 1)
    assert len(asked) == 3


def test_a_slot_that_is_there_is_not_gone(bench: PostgresBench) -> None:
    """None of these errors alone proves a loss; a slot that is missing on a primary does."""
    bench.source().ensure_start()
    for sqlstate in ("55000", "58P01", "42704"):
        assert isinstance(error_of(sqlstate, bench), SourceUnavailable)

    bench.drop_slot()
    for sqlstate in ("55000", "58P01", "42704"):
        lost = error_of(sqlstate, bench)
        assert isinstance(lost, PositionLost)
        assert "is gone (was it dropped, or did a failover leave it behind?" in str(lost)


def test_an_old_server_says_only_with_the_error_that_log_is_gone(
    postgres_version: PostgresVersion,
) -> None:
    """Before PostgreSQL 13 slots do not show it."""
    with PostgresBench(postgres_version(12).create_database()) as bench:
        bench.source().ensure_start()

        assert isinstance(error_of("58P01", bench), PositionLost)
        assert isinstance(error_of("55000", bench), SourceUnavailable)


def test_a_slot_that_was_invalidated_is_lost(start_postgres: StartPostgres) -> None:
    """The slot itself says so, whatever the stream's error was."""
    server = start_postgres({"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB"})
    with PostgresBench(server.dsn) as bench:
        bench.source().ensure_start()
        short = slots.short_of_log(bench.connection, bench.slot)
        assert "command line (max_slot_wal_keep_size=1024) and restart the server" in short.text
        assert short.commands == ()
        for number in range(3):
            bench.value("SELECT pg_switch_wal()::text")
            bench.execute(insert("other", number))
            bench.connection.execute("CHECKPOINT")

        lost = error_of("55000", bench)

    assert isinstance(lost, PositionLost)
    assert "was invalidated" in str(lost)


def test_a_slot_becomes_a_failover_slot(postgres_version: PostgresVersion) -> None:
    """One that was made before somebody asked for it; nothing that it holds is lost."""
    with PostgresBench(postgres_version(18).create_database()) as bench:
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        options = PostgresOptions(failover_slot=True)
        asked = "SELECT failover FROM pg_replication_slots WHERE slot_name = %s"
        assert bench.value(asked, bench.slot) is False
        finding = [
            one for one in bench.source(options=options).preflight(start, None) if one.level != "ok"
        ]
        assert "becomes a failover slot when the next run begins" in finding[0].text

        taken = take(bench, start, whole(1), source=bench.source(options=options))

        assert taken.changes == inserts("orders", 1)
        assert bench.value(asked, bench.slot) is True
