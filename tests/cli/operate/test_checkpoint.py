"""Tests of `checkpoint show`, `reset` and `import` with a real state store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.cli.operate import checkpoint
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.first_start import first_start
from deltaforge_dagster.pipeline.control.work import begin
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import is_quiet
from tests.sensors.test_tick_postgres import FILE as TICKED
from tests.sources.postgres.bench import PostgresBench
from tests.state.make import NAME, capture, deliver, held


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The state store of the installation."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


@pytest.fixture
def lease(store: StateStore) -> Lease:
    """A held lease; there are three ranges of two segments, and `cache` has everything up to the second range."""
    lease = held(store, "cache", "file")
    for first in (1, 3, 5):
        capture(store, lease, first, first + 1)
    deliver(store, lease, "cache", 4)
    return lease


@pytest.fixture
def released(store: StateStore, lease: Lease) -> None:
    """The same store with a released lease."""
    with store.fenced(lease) as writer:
        writer.lease.release()


def reset(to: str, sink: str = "cache") -> str:
    """Reset a checkpoint and return what was printed."""
    arguments = ["checkpoint", "reset", NAME, "--sink", sink, "--to", to]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(to: str, sink: str = "cache", pipeline: str = NAME) -> str:
    """Try to reset a checkpoint and return the error message."""
    arguments = ["checkpoint", "reset", pipeline, "--sink", sink, "--to", to]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_show(store: StateStore, lease: Lease) -> None:
    """`show` prints each sink's checkpoint, with the row if it is inside a segment."""
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("file", 2, 1, False, None)

    result = CliRunner().invoke(app, ["checkpoint", "show", NAME])

    assert result.exit_code == 0
    assert not [line for line in result.output.splitlines() if line.endswith(" ")]
    lines = [line.split("  ") for line in result.output.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == [
        "sink",
        "state",
        "segment",
        "row",
        "behind",
        "source position",
        "last moved",
    ]
    assert cells[1][:6] == ["cache", "attached", "4", "all", "2", "lsn 0/00000400 tx_id 4"]
    assert cells[2][:6] == ["file", "attached", "2", "1", "5", "lsn 0/00000000 tx_id 0"]
    assert cells[4:] == [["committed", "-"], ["captured", "lsn 0/00000600 tx_id 6"]]


def test_reset_of_a_sink_that_writes_tables(store: StateStore, lease: Lease) -> None:
    """It says that tables skip what they have, unless nothing is delivered again."""
    with store.fenced(lease) as writer:
        writer.table_commits.restart("cache", 4)
        writer.lease.release()

    assert "Its tables skip what they have" in reset("oldest")
    assert "tables" not in reset("tail")


@pytest.mark.usefixtures("lease")
def test_show_as_json(store: StateStore) -> None:
    """`show --json` prints the same, with positions as objects."""
    result = CliRunner().invoke(app, ["checkpoint", "show", NAME, "--json"])

    shown = json.loads(result.stdout)
    assert (shown["pipeline"], shown["next_segment"], shown["committed_position"]) == (
        NAME,
        7,
        None,
    )
    assert shown["captured_position"] == {"lsn": "0/00000600", "tx_id": 6}
    row = store.checkpoints.read(NAME)["cache"]
    assert shown["sinks"]["cache"] == {
        "state": "attached",
        "segment": 4,
        "ordinal": 2,
        "complete": True,
        "segments_behind": 2,
        "first_segment": 1,
        "source_position": {"lsn": "0/00000400", "tx_id": 4},
        "failures": 0,
        "updated_at": row.updated_at,
    }


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(
    ("to", "segment", "expected"),
    [
        ("oldest", 0, "continues with segment 1: delivers 4 segments again, up to 4."),
        ("range:2", 2, "continues with segment 3: delivers 2 segments again, up to 4."),
        ("range:3", 4, "continues with segment 5: as before."),
        ("tail", 6, "continues with segment 7: skips 2 segments, from 5 on."),
    ],
)
def test_reset(store: StateStore, to: str, segment: int, expected: str) -> None:
    """Each form of `--to` sets the checkpoint, and the command prints what that means."""
    assert reset(to) == f"cache {expected}\n"
    checkpoint = store.checkpoints.read(NAME)["cache"]
    assert (checkpoint.segment, checkpoint.complete) == (segment, True)


@pytest.mark.usefixtures("released")
def test_reset_of_a_failed_sink(store: StateStore) -> None:
    """A reset clears failures, and can restart a partly delivered segment."""
    lease = store.leases.acquire(NAME, "run-2", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("cache", 5, 1, False, None)
        writer.checkpoints.failed("cache", "down", 0.0)
        writer.lease.release()

    assert reset("range:3") == "cache continues with segment 5: begins that segment again.\n"
    checkpoint = store.checkpoints.read(NAME)["cache"]
    assert (checkpoint.failures, checkpoint.last_error) == (0, None)


@pytest.mark.usefixtures("lease")
def test_a_held_pipeline_is_refused() -> None:
    """A reset is refused while a run holds the lease."""
    assert "held by run run-1" in refused("oldest")


@pytest.mark.usefixtures("released")
def test_wrong_words_are_refused() -> None:
    """Errors name unknown pipelines, sinks, ranges and words, and list the valid ones."""
    assert refused("oldest", pipeline="other").endswith("(there is: orders)\n")
    assert refused("oldest", sink="kafka").endswith("(there is: cache, file)\n")
    assert refused("range:9") == "error: pipeline 'orders' has no range 9\n"
    for wrong in ("newest", "range:", "range:x", "range", "7"):
        assert refused(wrong) == f"error: --to {wrong}: write oldest, tail or range:N\n"


@pytest.mark.usefixtures("released")
def test_reset_of_everything(store: StateStore, tmp_path: Path) -> None:
    """The pipeline has a new uid, no position and no journal files; segment numbers continue."""
    before = store.pipelines.get(NAME)
    assert before is not None
    orphan = tmp_path / "home" / "journal" / NAME / before.uid / f"{1:010d}-000001-{1:032x}.parquet"
    orphan.parent.mkdir(parents=True)
    orphan.write_text("")
    store.checkpoints.pause(NAME, "file")

    result = CliRunner().invoke(app, ["checkpoint", "reset", NAME, "--all", "--json"])

    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    after = store.pipelines.get(NAME)
    assert after is not None
    assert shown["uid"] == after.uid != before.uid
    assert (after.start_position, after.captured_position, after.next_segment) == (None, None, 7)
    assert not store.segments.read(NAME)
    assert not store.ranges.read(NAME)
    assert not orphan.exists()
    rows = store.checkpoints.read(NAME)
    assert {one.segment for one in rows.values()} == {6}
    assert all(one.overrules and one.first_segment == 7 for one in rows.values())
    assert {sink: one.state for sink, one in rows.items()} == {
        "cache": "attached",
        "file": "paused",
    }


@pytest.mark.usefixtures("released")
def test_a_reset_of_everything_asks_on_a_terminal(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the command lists what it will delete and asks; `--yes` skips that."""
    monkeypatch.setattr(checkpoint, "on_terminal", lambda: True)
    command = ["checkpoint", "reset", NAME, "--all"]

    result = CliRunner().invoke(app, command, input="n\n")
    assert result.exit_code == 1
    assert "the journal of orders (600 B), its ranges and positions" in result.stderr
    assert "2 segments that sink cache does not have yet" in result.stderr
    assert store.segments.read(NAME)

    assert CliRunner().invoke(app, [*command, "--yes"]).exit_code == 0
    assert not store.segments.read(NAME)


@pytest.mark.postgres
def test_a_reset_recreates_a_slot_that_nothing_can_be_read_from(
    store: StateStore, postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot with log from before its publication was recreated is replaced; changes after the reset are captured."""
    with PostgresBench(postgres_dsn) as bench:
        file = tmp_path / "pipelines" / "orders.yaml"
        file.parent.mkdir(exist_ok=True)
        monkeypatch.setenv("DELTAFORGE_PIPELINES", str(file))
        file.write_text(TICKED.format(dsn=bench.dsn, slot=bench.slot))
        loaded = load_pipeline(file)
        begin(store, loaded, bench.source)
        bench.execute("DROP PUBLICATION p")
        bench.execute("INSERT INTO orders VALUES (1, 'x')")
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")

        result = CliRunner().invoke(app, ["checkpoint", "reset", "orders", "--all"])

        assert result.exit_code == 0, result.output
        assert (
            f"dropped and created again: replication slot '{bench.slot}', which holds log from before"
            in (result.stdout)
        )
        row = store.pipelines.get("orders")
        assert row is not None
        assert row.start_position is not None
        start = parse_position(row.start_position)
        assert is_quiet(bench, start)
        bench.execute("INSERT INTO orders VALUES (2, 'x')")
        assert bench.source().has_changes(start)


@pytest.mark.usefixtures("lease")
def test_what_a_reset_needs() -> None:
    """A reset needs a sink and a target, or `--all` alone, and a pipeline that no run holds."""
    for options, expected in (
        (["--all", "--sink", "cache"], "leave --sink and --to out"),
        (["--sink", "cache"], "or --all"),
        ([], "or --all"),
        (["--all"], "held by run run-1; stop it, then reset"),
    ):
        result = CliRunner().invoke(app, ["checkpoint", "reset", NAME, *options])
        assert result.exit_code == 2
        assert expected in result.stderr


class TestImport:
    """`checkpoint import` from each kind of storage that DeltaForge had."""

    KEYS: ClassVar = {
        "db": '{"lsn": "0/10", "tx_id": null}',
        "db::sink::cache": '{"lsn": "0/30", "tx_id": 9}',
        "db::sink::file": '{"lsn": "0/20", "tx_id": 8}',
        "db-2::sink::file": '{"lsn": "0/1", "tx_id": 8}',
    }

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pipeline file; `store` is the installation's empty state store."""
        (tmp_path / "pipelines").mkdir()
        (tmp_path / "pipelines" / "orders.yaml").write_text(
            f"metadata: {{name: {NAME}, tenant: acme}}\n"
            "spec:\n"
            "  source: {type: postgres, config: {id: db, dsn: 'postgres://u@h/d', slot: s,"
            " publication: p, tables: [public.t]}}\n"
            "  sinks:\n"
            "    - {type: file, config: {id: cache, path: /tmp/a}}\n"
            "    - {type: file, config: {id: file, path: /tmp/b}}\n"
        )
        monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))

    def sqlite(self, path: Path, table: str) -> str:
        """Write a DeltaForge storage as it is while DeltaForge runs, with a log beside the file."""
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = WAL")
        if table == "df_kv":
            connection.execute(
                "CREATE TABLE df_kv (ns TEXT, key TEXT, val BLOB, updated_at INTEGER,"
                " expires_at INTEGER, PRIMARY KEY (ns, key))"
            )
            rows = [("checkpoints", key, value.encode()) for key, value in self.KEYS.items()]
            rows.append(("fsm", "db", b"x"))
            connection.executemany("INSERT INTO df_kv VALUES (?, ?, ?, 0, NULL)", rows)
        else:
            connection.execute("CREATE TABLE kv (namespace TEXT, key TEXT, value TEXT)")
            texts = [("checkpoints", key, value) for key, value in self.KEYS.items()]
            connection.executemany("INSERT INTO kv VALUES (?, ?, ?)", texts)
        connection.commit()
        connection.close()
        return str(path)

    def imported(self, store: StateStore, *options: str) -> str:
        """Run the import and return its output."""
        result = CliRunner().invoke(app, ["checkpoint", "import", NAME, *options])
        assert result.exit_code == 0, result.output
        return result.output

    @pytest.mark.parametrize("kind", ["df_kv", "kv", "json"])
    def test_from_files(self, store: StateStore, tmp_path: Path, kind: str) -> None:
        """The checkpoints of the source are copied, and the command prints the start position."""
        path = tmp_path / "deltaforge.db"
        if kind == "json":
            parsed = {key: json.loads(value) for key, value in self.KEYS.items()}
            path.write_text(json.dumps({**parsed, "db": self.KEYS["db"]}))
        else:
            self.sqlite(path, kind)
        content = path.read_bytes()

        said = self.imported(store, "--from", str(path))

        assert said == (
            "cache has everything up to lsn 0/00000030 tx_id 9.\n"
            "file has everything up to lsn 0/00000020 tx_id 8.\n"
            "orders begins at lsn 0/00000020 tx_id 8, or before it where a transaction begins.\n"
        )
        found = legacy.stored(Kv(store.database, legacy.NAMESPACE), "db")
        assert {key: json.loads(value) for key, value in found.items()} == {
            key: json.loads(value) for key, value in self.KEYS.items() if key != "db-2::sink::file"
        }
        assert path.read_bytes() == content
        self.imported(store, "--forget")
        assert not legacy.stored(Kv(store.database, legacy.NAMESPACE), "db")

    @pytest.mark.postgres
    def test_from_postgres(self, store: StateStore, postgres_dsn: str) -> None:
        """A PostgreSQL storage is read in the same way."""
        with psycopg.connect(postgres_dsn) as connection:
            connection.execute("CREATE TABLE df_kv (ns text, key text, val bytea)")
            for key, value in self.KEYS.items():
                row = ("checkpoints", key, value.encode())
                connection.execute("INSERT INTO df_kv VALUES (%s, %s, %s)", row)

        assert "orders begins at lsn 0/00000020" in self.imported(store, "--from", postgres_dsn)

    def test_a_first_start_takes_them(self, store: StateStore, tmp_path: Path) -> None:
        """The sink that is further ahead skips what it has; afterwards the imported checkpoints are gone."""
        self.imported(store, "--from", self.sqlite(tmp_path / "d.db", "df_kv"))
        store.pipelines.register(NAME, "spec", ["cache", "file"])
        first = first_start(store, load_pipeline(tmp_path / "pipelines" / "orders.yaml"))
        assert first.at is not None

        store.pipelines.set_start(NAME, first.at.to_json(), has=first.has, source_id="db")

        rows = store.checkpoints.read(NAME)
        assert (rows["file"].source_position, rows["file"].skip) == (first.at.to_json(), None)
        assert rows["cache"].skip == self.KEYS["db::sink::cache"].replace("0/30", "0/00000030")
        assert not legacy.stored(Kv(store.database, legacy.NAMESPACE), "db")

    def test_refusals(self, store: StateStore, tmp_path: Path) -> None:
        """There are separate errors for wrong storages, wrong checkpoints and pipelines that have started."""
        sound = self.sqlite(tmp_path / "sound.db", "df_kv")
        (tmp_path / "text").write_text("hello")
        (tmp_path / "corrupt.json").write_text('{"db::sink::file": "?"}')
        (tmp_path / "others.json").write_text('{"x": "?"}')
        sqlite3.connect(tmp_path / "empty.db").execute("CREATE TABLE t (a)").connection.close()
        for storage, expected in (
            ("gone.db", "does not exist"),
            ("text", "neither a SQLite file nor a JSON object"),
            ("empty.db", "has neither a table df_kv nor kv"),
            ("others.json", "holds no checkpoint of source 'db'"),
            ("corrupt.json", "the checkpoint db::sink::file of DeltaForge is no position"),
        ):
            arguments = ["checkpoint", "import", NAME, "--from", str(tmp_path / storage)]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code in {1, 2}
            assert expected in result.stderr
        held(store, "cache", "file")
        result = CliRunner().invoke(app, ["checkpoint", "import", NAME, "--from", sound])
        assert "has already started" in result.stderr
        assert "deltaforge checkpoint reset orders --all" in result.stderr
