"""What a look at a MySQL server finds; a real server for each point that can be tried."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import pytest

from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.mysql.connection import server_log
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_lab.servers.mysql_programs import Version
from tests.fix_mysql import EVERY_SERVER, MysqlVersion, StartMysql
from tests.sources.mysql.bench import MysqlBench
from tests.sources.mysql.test_source import PASSWORD, as_user

pytestmark = pytest.mark.mysql


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    with MysqlBench(mysql_dsn) as made:
        yield made


def preflight_of(
    bench: MysqlBench,
    position: BinlogPosition | None = None,
    as_of: float | None = None,
    *,
    snapshot: bool = False,
    **config: object,
) -> dict[str, Finding]:
    """Return the worst finding per subject."""
    source = bench.source(**config)
    try:
        found = source.preflight(position, as_of, snapshot=snapshot)
    finally:
        source.close()
    assert PASSWORD not in str(found)
    levels = ["ok", "note", "warning", "error"]
    return {one.subject: one for one in sorted(found, key=lambda one: levels.index(one.level))}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    """Return the level per subject."""
    return {subject: one.level for subject, one in found.items()}


def test_a_server_that_is_as_needed(bench: MysqlBench) -> None:
    """The server of the tests can be captured, before and after the first run; nothing is changed."""
    start = bench.source().ensure_start()

    for found in (preflight_of(bench), preflight_of(bench, start, time.time())):
        assert "error" not in levels(found).values()
        assert found["tables"].text == "2 match source.config.tables"
    assert bench.source().head() == start


def test_patterns_that_match_nothing_are_named(bench: MysqlBench) -> None:
    """A person sees what was looked for."""
    found = preflight_of(bench, tables=("nowhere.%", "none.order_*"))["tables"]

    assert found.level == "warning"
    assert found.text == "no table matches source.config.tables (nowhere.%, none.order_*)"


def test_a_pattern_that_matches_nothing_beside_others(bench: MysqlBench) -> None:
    """It is named, since it may be misspelt."""
    found = preflight_of(bench, tables=(f"{bench.database}.orders", "none.order_*"))["tables"]

    assert found.level == "warning"
    assert found.text.startswith("no table matches none.order_* of source.config.tables")


def test_a_table_without_a_key_and_one_that_is_missing(bench: MysqlBench) -> None:
    """All are named, each with a statement."""
    bench.run("CREATE TABLE keyless (a INT)", "CREATE TABLE another (a INT)")
    database = bench.database

    found = preflight_of(
        bench, tables=(f"{database}.another", f"{database}.keyless", f"{database}.gone")
    )

    assert found["keys"].level == "note"
    assert f"{database}.keyless" in found["keys"].text
    assert "; ".join(found["keys"].commands) == (
        f"ALTER TABLE `{database}`.`another` ADD PRIMARY KEY (...); "
        f"ALTER TABLE `{database}`.`keyless` ADD PRIMARY KEY (...)"
    )
    assert f"{database}.gone" in found["tables"].text
    assert found["tables"].level == "error"


def test_tables_that_nobody_can_tell_of(bench: MysqlBench) -> None:
    """Without a right to see a table it may be there or not: a warning, with the GRANT."""
    dsn = as_user(bench, "REPLICATION SLAVE", "REPLICATION CLIENT")
    (found,) = bench.source(dsn=dsn).maintain(None)
    assert (found.subject, found.level) == ("tables", "warning")
    assert "not there, or not for user" in found.text


def test_databases_that_the_server_does_not_log(start_mysql: StartMysql) -> None:
    """What `binlog-ignore-db` leaves out is not captured: an error of every look, with what to change."""
    server = start_mysql({"binlog_ignore_db": "quiet"})
    with MysqlBench(server.create_database()) as bench:
        bench.run("CREATE DATABASE quiet", "CREATE TABLE quiet.t (id INT PRIMARY KEY)")
        source = bench.source(tables=(f"{bench.database}.orders", "quiet.*"))
        (found,) = source.maintain(source.ensure_start())
        assert (found.subject, found.level) == ("binlog filter", "error")
        assert found.text.endswith("(binlog-ignore-db): quiet")
        assert bench.source(tables=("*.orders",)).maintain(None) == []


def test_partial_documents_without_the_whole_ones(bench: MysqlBench) -> None:
    """Differences from documents that are not logged cannot be captured, which is an error."""
    bench.run(
        "SET GLOBAL binlog_row_value_options = PARTIAL_JSON",
        "SET GLOBAL binlog_row_image = MINIMAL",
    )
    try:
        found = preflight_of(bench)["binlog_row_value_options"]
        bench.run("SET GLOBAL binlog_row_image = FULL")
        fixed = preflight_of(bench)
    finally:
        bench.run("SET GLOBAL binlog_row_value_options = ''", "SET GLOBAL binlog_row_image = FULL")

    assert (found.level, found.remedy) == ("error", "SET PERSIST binlog_row_image = FULL")
    assert "binlog_row_value_options" not in fixed


@pytest.mark.parametrize("image", ["MINIMAL", "NOBLOB"])
def test_images_that_lack_columns(bench: MysqlBench, image: str) -> None:
    """They are a note for messages, and a warning if a sink keeps the rows of tables."""
    bench.run(f"SET GLOBAL binlog_row_image = {image}")
    try:
        with contextlib.closing(
            MysqlSource(bench.config(), "orders", whole_inserts=True)
        ) as source:
            tables = {one.subject: one for one in source.preflight(None, None)}
        messages = preflight_of(bench)
    finally:
        bench.run("SET GLOBAL binlog_row_image = FULL")

    found = tables["binlog_row_image"]
    assert (found.level, found.remedy) == ("warning", "SET PERSIST binlog_row_image = FULL")
    assert "tables get these where they are constants" in found.text
    assert messages["binlog_row_image"].level == "note"
    assert "binlog_row_image" not in preflight_of(bench)


@pytest.mark.parametrize("half", ["SELECT", "REPLICATION SLAVE", "REPLICATION CLIENT"])
def test_grants_that_are_missing(bench: MysqlBench, half: str) -> None:
    """What the user may not do is an error with the statement that grants it; one of two is not enough."""
    dsn = as_user(bench, half)
    found = preflight_of(bench, dsn=dsn)

    assert found["grants"].level == "error"
    assert "may not read the binary log" in found["grants"].text
    bench.run(*found["grants"].commands)
    bench.run(f"GRANT SELECT ON *.* TO 'u{bench.database[-12:]}'@'%'")
    assert preflight_of(bench, dsn=dsn)["grants"].level == "ok"
    assert bench.rows("SHOW SLAVE HOSTS") == [], "nobody is left in the list of replicas"


@pytest.mark.parametrize("version", [one for one in EVERY_SERVER if one != "8.0"])
def test_grants_of_other_servers(mysql_version: MysqlVersion, version: Version) -> None:
    """MariaDB shows nobody whether it sends its log: it is tried, and each half is missed as with MySQL."""
    with MysqlBench(mysql_version(version).create_database()) as bench:
        account = f"'u{bench.database[-12:]}'@'%'"
        dsn = as_user(bench, "SELECT")
        for more in ("REPLICATION CLIENT", "SELECT"):
            refused = preflight_of(bench, dsn=dsn)["grants"]
            assert refused.level == "error"
            assert refused.commands == (
                f"GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO {account}",
            )
            bench.run(f"GRANT {more} ON *.* TO {account}")

        bench.run(*refused.commands)
        assert preflight_of(bench, dsn=dsn)["grants"].level == "ok"


def test_tables_that_may_not_be_read(bench: MysqlBench) -> None:
    """A table that the user sees and may not read is a note with the GRANT, an error with a snapshot."""
    dsn = as_user(bench, "REPLICATION SLAVE", "REPLICATION CLIENT", "INSERT")

    found, read = preflight_of(bench, dsn=dsn), preflight_of(bench, dsn=dsn, snapshot=True)

    assert (found["grants"].level, read["grants"].level) == ("note", "error")
    assert found["grants"].commands[0].startswith(f"GRANT SELECT ON `{bench.database}`.")
    assert found["grants"].remedy == read["grants"].remedy
    assert "which the snapshot needs" in read["grants"].text


def test_tables_that_may_not_be_locked(bench: MysqlBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GTIDs a snapshot locks tables; whether it may is asked without locking one."""
    dsn = as_user(bench, "REPLICATION SLAVE", "REPLICATION CLIENT", "SELECT")
    assert preflight_of(bench, dsn=dsn, snapshot=True)["grants"].level == "ok", "with GTIDs"
    monkeypatch.setattr(server_log, "facts", lambda *_: server_log.BinlogSettings(gtids=False))

    found = preflight_of(bench, dsn=dsn, snapshot=True)["grants"]

    assert found.level == "warning"
    assert found.commands[0].startswith(f"GRANT LOCK TABLES, SELECT ON `{bench.database}`.*")
    assert preflight_of(bench, dsn=dsn)["grants"].level == "ok", "without a snapshot"
    bench.run(f"GRANT LOCK TABLES ON *.* TO 'u{bench.database[-12:]}'@'%'")
    assert preflight_of(bench, dsn=dsn, snapshot=True)["grants"].level == "ok"


def test_an_outbox_that_is_not_there(bench: MysqlBench) -> None:
    """Nothing comes from it; once it is there, a snapshot needs no right to read it."""
    both = (f"{bench.database}.orders", f"{bench.database}.outbox")
    outbox = {"tables": both[1:]}
    grants = ("REPLICATION SLAVE", "REPLICATION CLIENT", "INSERT")
    dsn = as_user(bench, *grants)
    bench.run(f"GRANT SELECT ON {bench.database}.orders TO 'u{bench.database[-12:]}'@'%'")

    assert preflight_of(bench, tables=both, outbox=outbox)["outbox"].level == "warning"
    bench.run("CREATE TABLE outbox (id INT PRIMARY KEY)")
    found = preflight_of(bench, dsn=dsn, snapshot=True, tables=both, outbox=outbox)
    assert "outbox" not in found
    assert found["grants"].level == "ok"


def test_a_position_that_the_log_no_longer_has(bench: MysqlBench) -> None:
    """A position of another server is an error, and says so before a run does."""
    start = bench.source().ensure_start()
    foreign = dataclasses.replace(start, gtid_set="3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5")

    found = preflight_of(bench, foreign, time.time())

    assert found["position"].level == "error"
    assert "Re-snapshot required" in found["position"].text


@pytest.mark.parametrize(("share", "level"), [(0.3, "ok"), (0.6, "warning"), (0.9, "error")])
def test_retention_against_lag(bench: MysqlBench, share: float, level: str) -> None:
    """The older the newest captured change when more follows, the closer it is to be lost."""
    start = bench.source().ensure_start()
    bench.run("INSERT INTO orders VALUES (1, 'x')")
    (seconds,) = bench.rows("SELECT @@GLOBAL.binlog_expire_logs_seconds")[0]

    found = preflight_of(bench, start, time.time() - share * int(seconds))

    assert found["retention"].level == level
    assert (found["retention"].remedy is None) == (level == "ok")
    assert preflight_of(bench, bench.source().head(), 0.0)["retention"].level == "ok", (
        "nothing behind"
    )


def test_a_retention_of_less_than_a_day(bench: MysqlBench) -> None:
    """It is a warning even before anything was captured: who comes back after it has lost the position."""
    (before,) = bench.rows("SELECT @@GLOBAL.binlog_expire_logs_seconds")[0]
    bench.run("SET GLOBAL binlog_expire_logs_seconds = 7200")
    try:
        found = preflight_of(bench)["retention"]
        bench.run("SET GLOBAL binlog_expire_logs_seconds = 0")
        assert preflight_of(bench)["retention"].level == "ok", "for ever"
    finally:
        bench.run(f"SET GLOBAL binlog_expire_logs_seconds = {before}")

    assert (found.level, found.remedy) == (
        "warning",
        "SET PERSIST binlog_expire_logs_seconds = 604800",
    )


def test_the_server_has_our_id(bench: MysqlBench) -> None:
    """A server whose id is ours would send us nothing of what it wrote itself."""
    (before,) = bench.rows("SELECT @@GLOBAL.server_id")[0]
    try:
        bench.run(f"SET GLOBAL server_id = {bench.server_id}")
        assert preflight_of(bench)["server id"].level == "error"
    finally:
        bench.run(f"SET GLOBAL server_id = {before}")
