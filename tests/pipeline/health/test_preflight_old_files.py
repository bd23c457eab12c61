"""Which tables of Delta are named because their files may have timestamps as INT96."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import insert

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.health.preflight import int96_findings
from deltaforge_dagster.state.database.tables import table_writes
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.state.make import NAME, held, position

FILE = f"""\
metadata: {{name: {NAME}, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://localhost/shop", slot: s, publication: p, tables: [public.orders]}}
  sinks:
    - {{type: KIND, config: {{id: lake, mode: current, PLACE}}}}
"""
DELTA = ("delta", "path: /var/lake")
ICEBERG = ("iceberg", "catalog_properties: {type: hadoop, warehouse: /var/lake}")
COLUMNS = (("id", "bigint"), ("at", "timestamp"), ("df_event_time", "timestamp"))


def pipeline(folder: Path, kind: tuple[str, str]) -> LoadedPipeline:
    """Return a pipeline whose sink writes tables of a format."""
    file = folder / f"{NAME}.yaml"
    file.write_text(FILE.replace("KIND", kind[0]).replace("PLACE", kind[1]))
    return load_pipeline(file)


def write(
    store: StateStore, lease: Lease, to: int, columns: tuple[tuple[str, str], ...], *, int64: bool
) -> None:
    """Record a commit to a table."""
    made = TableWrite(("public", "orders"), ("raw", "orders"), columns, 5, position(to), 0.0, int64_timestamps=int64)  # fmt: skip
    with store.fenced(lease) as writer:
        if to == 1:
            writer.table_commits.restart("lake", 0)
        writer.table_commits.advance("lake", to, (), [made])


def test_a_table_with_old_files_until_it_is_loaded_again(store: StateStore, tmp_path: Path) -> None:
    """It is named with its columns and the command that helps; a commit of today's release does not change that."""
    delta, iceberg = pipeline(tmp_path, DELTA), pipeline(tmp_path, ICEBERG)
    assert int96_findings(None, delta) == int96_findings(store, delta) == []
    lease = held(store)
    write(store, lease, 1, COLUMNS, int64=False)
    (found,) = int96_findings(store, delta)
    assert found.level == "warning"
    assert "raw.orders" in found.text
    assert "(at)" in found.text
    assert found.remedy == f"deltaforge resync {NAME} --sink lake --tables public.orders"
    assert int96_findings(store, iceberg) == []  # which never had any
    write(store, lease, 2, COLUMNS, int64=True)
    assert int96_findings(store, delta) == []


def test_columns_that_were_never_wrong(store: StateStore, tmp_path: Path) -> None:
    """Times without a zone were always INT64, and our own are near today; those in arrays count."""
    lease = held(store)
    write(store, lease, 1, (("id", "bigint"), ("at", "timestamp_ntz"), *COLUMNS[2:]), int64=False)  # fmt: skip
    assert int96_findings(store, pipeline(tmp_path, DELTA)) == []
    write(store, lease, 2, (("id", "bigint"), ("ats", "array<timestamp>")), int64=False)
    assert len(int96_findings(store, pipeline(tmp_path, DELTA))) == 1


def test_writes_of_earlier_releases(store: StateStore, tmp_path: Path) -> None:
    """A row that does not say, as those from before the state store was migrated, counts as old files."""
    held(store)
    with store.database.write() as connection:
        connection.execute(
            insert(table_writes).values(
                pipeline=NAME,
                sink="lake",
                source='["public","orders"]',
                segment=1,
                destination=["raw", "orders"],
                columns=COLUMNS,
                changes=1,
                position=position(1),
                changed_at=0.0,
                written_at=0.0,
                published=True,
            )
        )
    assert len(int96_findings(store, pipeline(tmp_path, DELTA))) == 1
