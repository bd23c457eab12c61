"""The log is read again and compared with the journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import update

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.pipeline.replay.recapture import Compared, recapture
from deltaforge_dagster.state.database.tables import segments
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.pipeline.capturing import Stage
from tests.pipeline.changes import PlayedSource
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql


@pytest.fixture
def stage(mysql_dsn: str, tmp_path: Path) -> Iterator[Stage]:
    """A pipeline that captures `orders` and `items`."""
    store = StateStore.open(f"sqlite:///{tmp_path / 'state.db'}")
    try:
        with MysqlBench(mysql_dsn) as bench:
            yield Stage(bench, store, tmp_path / "journal", knows_tables=True)
    finally:
        store.close()


def again(stage: Stage, *ranges: int) -> list[Compared]:
    """Capture ranges again."""
    source = stage.bench.source()
    try:
        return list(
            recapture(
                stage.store, stage.journal, source, pipeline="p", tenant="acme", ranges=ranges
            )
        )
    finally:
        source.close()


def test_closed_ranges_are_the_same_in_the_log(stage: Stage) -> None:
    """Several ranges with DDL, after the table was altered once more; one changed row is named."""
    bench = stage.bench
    bench.execute(insert("orders", 1, 2), insert("items", 1))
    bench.run("ALTER TABLE orders RENAME COLUMN v TO w")
    bench.execute(insert("orders", 3))
    stage.capture(lambda _: len(stage.rows()) >= 5)
    bench.run("ALTER TABLE orders RENAME COLUMN w TO x")
    bench.execute(insert("orders", 4, 5, 6))
    stage.capture(lambda _: len(stage.rows()) >= 9)
    bench.run("ALTER TABLE orders RENAME COLUMN x TO y")
    stage.capture(lambda _: len(stage.rows()) >= 10)

    numbers = [row.range for row in stage.store.ranges.read("p")]
    assert len(numbers) == 3
    compared = again(stage, *numbers)
    assert [one.segment for one in compared] == [
        one.segment for one in stage.store.segments.read("p")
    ]
    assert all(one.equal for one in compared), compared
    assert sum(one.again for one in compared) == 10

    tampered = [one for one in stage.store.segments.read("p") if one.rows >= 3][-1]
    rows = pa.Table.from_batches(list(stage.journal.batches(tampered))).select(CAPTURED.names)
    texts = rows["after"].to_pylist()
    texts[-2] = "{}"
    changed = rows.set_column(
        rows.schema.get_field_index("after"), CAPTURED.field("after"), [texts]
    )
    writer = stage.journal.writer("p", "uid", tampered.segment, 99)
    for batch in changed.cast(CAPTURED).combine_chunks().to_batches():
        writer.write(batch)
    written = writer.close()
    with stage.store.database.write() as connection:
        connection.execute(
            update(segments)
            .where(segments.c.segment == tampered.segment)
            .values(path=written.path, content_hash=written.content_hash)
        )
    (found,) = [one for one in again(stage, *numbers[1:]) if not one.equal]
    assert found == Compared(
        tampered.segment, tampered.rows, tampered.rows, (len(texts) - 2,), ("after",)
    )


def test_a_source_that_forgets_says_so(stage: Stage) -> None:
    """PostgreSQL gives its log once; a range that is not there is named."""
    stage.bench.execute(insert("orders", 1))
    stage.capture(lambda _: len(stage.rows()) >= 1)
    (row,) = stage.store.ranges.read("p")

    with pytest.raises(NotAllowed, match="cannot be captured again"):
        list(
            recapture(
                stage.store,
                stage.journal,
                PlayedSource([]),
                pipeline="p",
                tenant="acme",
                ranges=[row.range],
            )
        )
    with pytest.raises(NotAllowed, match="there is no range 9"):
        again(stage, 9)
