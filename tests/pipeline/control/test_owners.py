"""What two pipelines cannot share: which of it two files have in common, and who has it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.control.owners import claim, conflicts, rivalries
from deltaforge_dagster.pipeline.control.user_requests import request_end
from deltaforge_dagster.pipeline.control.work import NoWork, find_work, register
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import PlayedSource

POSTGRES = '{{type: postgres, config: {{id: {id}, dsn: "{dsn}", slot: {slot}, publication: p, tables: [{tables}]}}}}'
MYSQL = '{{type: mysql, config: {{id: {id}, dsn: "{dsn}", tables: [{tables}]}}}}'
TURSO = "{{type: turso, config: {{id: {id}, url: {dsn}, tables: [{tables}], auto_create_triggers: true}}}}"
LINES = "{type: file, config: {id: lines, path: /tmp/lines.jsonl}}"

SINKS = {
    "postgres": '{{type: postgres, config: {{id: a, dsn: "postgres://{login}@wh/db", table: "{table}"}}}}',
    "delta": '{{type: delta, config: {{id: a, path: /lake, table: "{table}"}}}}',
    "iceberg": (
        '{{type: iceberg, config: {{id: a, catalog_properties: {{type: hadoop, warehouse: /ice}}, table: "{table}"}}}}'
    ),
    "clickhouse": (
        '{{type: clickhouse, config: {{id: a, url: "http://ch:8123", database: d, table: "{one_part}"}}}}'
    ),
    "s3": '{{type: s3, config: {{id: a, bucket: cdc, prefix: raw, folder: "{table}/${{time.day}}"}}}}',
    "nats": (
        '{{type: nats, config: {{id: a, url: "nats://{login}@n", stream: S, subject: "{table}", exactly_once: true}}}}'
    ),
}
TEMPLATE = "${source.schema}.${source.table}"


@dataclasses.dataclass
class Files:
    """Writes pipeline files into a folder."""

    folder: Path

    def write(self, name: str, source: str, sink: str = LINES, file: str = "") -> LoadedPipeline:
        """Return the pipeline of a file that was just written."""
        path = self.folder / (file or f"{name}.yaml")
        path.write_text(
            f"metadata: {{name: {name}, tenant: acme}}\nspec:\n  source: {source}\n  sinks:\n    - {sink}\n"
        )
        return load_pipeline(path)

    def slot(self, name: str, slot: str, file: str = "") -> LoadedPipeline:
        """Return a pipeline of PostgreSQL with a slot."""
        return self.write(name, postgres(slot=slot), file=file)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The files of an installation."""
    return Files(tmp_path)


def postgres(
    slot: str, tables: str = "public.t", dsn: str = "postgres://u:pw@localhost/db", name: str = "a"
) -> str:
    """Return a source block."""
    return POSTGRES.format(id=name, dsn=dsn, slot=slot, tables=tables)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (postgres("s"), postgres("s", dsn="postgres://v:other@127.0.0.1:5432/db"), "slot 's'"),
        (postgres("s"), postgres("s", dsn="host=LOCALHOST dbname=another"), "slot 's'"),
        (postgres("s"), postgres("t"), None),
        (postgres("s"), postgres("s", dsn="postgres://u:pw@db2/db"), None),
        (postgres("s"), postgres("s", dsn="postgres://u:pw@localhost:5433/db"), None),
        (
            MYSQL.format(id="a", dsn="mysql://u:p@h/x", tables="x.t"),
            MYSQL.format(id="a", dsn="mysql://w:q@h:3306/y", tables="y.t"),
            "source 'a'",
        ),
        (
            MYSQL.format(id="a", dsn="mysql://u:p@h/x", tables="x.t"),
            MYSQL.format(id="b", dsn="mysql://u:p@h/x", tables="x.t"),
            None,
        ),
        (
            TURSO.format(id="a", dsn="file:/data/app.db", tables="t"),
            TURSO.format(id="b", dsn="/data/app.db", tables="u"),
            "in '/data/app.db'",
        ),
        (
            TURSO.format(id="a", dsn="/data/app.db", tables="t"),
            TURSO.format(id="b", dsn="/data/b.db", tables="t"),
            None,
        ),
    ],
)
def test_a_log_has_one_reader(files: Files, one: str, other: str, shared: str | None) -> None:
    """Slots, server ids and change tables are of one server, whatever it is called and whoever logs in."""
    first, second = files.write("one", one), files.write("two", other)

    found = rivalries(second, [first, second])

    assert [shared in line for line in found] == ([True] if shared else [])  # type: ignore[operator]
    for line in found:
        assert f"{second.path}: " in line
        assert f"pipeline one ({first.path})" in line
        assert "pw" not in line


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        # The tables of one source, or what tables of two sources are called alike.
        (("db", "public.t"), ("db", "public.t"), True),
        (("db", "public.t"), ("other", "public.t"), True),
        (("db", "shop.*"), ("db", "shop.o%"), True),
        (("db", "shop.*"), ("db", "shop.orders"), True),
        (("db", "public.t"), ("db", "public.u"), False),
        (("db", "shop.a*"), ("db", "shop.b*"), False),
        # Which tables match is known of one source only.
        (("db", "shop.*"), ("other", "shop.*"), False),
    ],
)
def test_a_destination_has_one_writer(
    files: Files, kind: str, one: tuple[str, str], other: tuple[str, str], *, shared: bool
) -> None:
    """Tables, folders of objects and positions in a stream are compared as far as the files determine them."""

    def written(name: str, source: tuple[str, str]) -> LoadedPipeline:
        database, tables = source
        dsn = f"postgres://u:pw@localhost/{database}"
        part = "${source.schema}_${source.table}"
        block = SINKS[kind].format(table=TEMPLATE, one_part=part, login=f"{name}:pw")
        return files.write(name, postgres(name, tables, dsn), block)

    first, second = written("one", one), written("two", other)

    found = rivalries(second, [first])
    # A sink's position in NATS is the last message of all subjects that its template can make.
    assert len(found) == (1 if shared or kind == "nats" else 0)
    assert all("spec.sinks[0].config." in line for line in found)


@pytest.mark.parametrize(
    "moved",
    [
        ("/lake", "/lake2"),
        ("/ice", "/ice2"),
        ("wh/db", "wh/db2"),
        ("ch:8123", "ch:8124"),
        ("prefix: raw", "prefix: raw2"),
        ("stream: S", "stream: T"),
    ],
)
def test_another_place_is_shared_by_nobody(files: Files, moved: tuple[str, str]) -> None:
    """The same names on another server, or in another folder, are others."""
    for block in SINKS.values():
        sink = block.format(table=TEMPLATE, one_part="${source.table}", login="u:pw")
        if moved[0] in sink:
            first = files.write("one", postgres("a"), sink)
            second = files.write("two", postgres("b"), sink.replace(*moved))
            assert rivalries(second, [first]) == []
            return
    raise AssertionError(moved)


def test_the_first_that_works_has_it(sqlite_store: StateStore, files: Files) -> None:
    """A copy under another name is refused, with both files, until one of them names something else."""
    shop, copy = files.slot("shop", "s"), files.slot("copy", "s")
    register(sqlite_store, shop)

    for _ in range(2):
        with pytest.raises(SpecError, match=r"slot 's' is used by pipeline shop") as refused:
            find_work(sqlite_store, copy, lambda: PlayedSource([]))
    assert str(shop.path) in str(refused.value)
    assert str(copy.path) in str(refused.value)
    assert conflicts(sqlite_store, copy) == list(refused.value.problems)
    register(sqlite_store, shop)  # its owner goes on

    register(sqlite_store, files.slot("shop", "t"))
    assert isinstance(find_work(sqlite_store, copy, lambda: PlayedSource([])), NoWork)
    with pytest.raises(SpecError, match="pipeline copy"):
        register(sqlite_store, shop)


def test_a_refused_pipeline_can_be_stopped(sqlite_store: StateStore, files: Files) -> None:
    """It is known, so that status shows why nothing works on it, and can be stopped."""
    register(sqlite_store, files.slot("shop", "s"))
    copy = files.slot("copy", "s")

    request_end(sqlite_store, copy, "stopped")

    row = sqlite_store.pipelines.get("copy")
    assert row is not None
    assert row.desired_state == "stopped"


def test_a_file_with_a_new_name_takes_over(sqlite_store: StateStore, files: Files) -> None:
    """The same file under a new name has what it had; a file that is gone keeps it until its pipeline is removed."""
    register(sqlite_store, files.slot("shop", "s", file="p.yaml"))
    renamed = files.slot("renamed", "s", file="p.yaml")
    assert conflicts(sqlite_store, renamed) == []
    register(sqlite_store, renamed)

    moved = files.slot("moved", "s")
    (files.folder / "p.yaml").unlink()
    with pytest.raises(SpecError, match=r"p\.yaml, which is gone"):
        claim(sqlite_store, moved)
    sqlite_store.pipelines.remove("renamed")
    claim(sqlite_store, moved)


def test_a_new_name_does_not_take_over_from_a_live_run(
    sqlite_store: StateStore, files: Files
) -> None:
    """A run that works under the old name ends first."""
    register(sqlite_store, files.slot("shop", "s", file="p.yaml"))
    lease = sqlite_store.leases.acquire("shop", "run", 30)
    assert lease is not None
    renamed = files.slot("renamed", "s", file="p.yaml")

    with pytest.raises(SpecError, match="pipeline shop"):
        claim(sqlite_store, renamed)
    with sqlite_store.fenced(lease) as writer:
        writer.lease.release()
    claim(sqlite_store, renamed)
