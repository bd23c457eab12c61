"""What Spark's task does for sensing, over real journal files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.errors import DeltaforgeError, JournalDamaged
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.sensing.job import REPORT, SensingJob, learned_by
from deltaforge_dagster.sensing.learning import Learned, restored
from tests.pipeline.sensed import VERSIONS, documents
from tests.processors.rows import Row, batch

OPTIONS = SchemaSensing(enabled=True)


def written(journal: Journal, segment: int, rows: list[Row]) -> str:
    """Write a segment; return its path."""
    writer = journal.writer("orders", "uid", segment, 1)
    writer.write(batch(rows).select(CAPTURED.names))
    return writer.close().path


def run(journal: Journal, paths: list[str], states: dict[str, bytes]) -> list[Learned]:
    """Return what a task learns, as the run gets it."""
    job = SensingJob(OPTIONS, journal.url, paths, VERSIONS, states)
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    return learned_by(pa.Table.from_batches(job.run([numbers]), REPORT))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal(tmp_path.as_uri())


def test_segments_after_what_was_known(journal: Journal) -> None:
    """Segments in one job or in two, one after what is known of the other, give the same."""
    paths = [written(journal, number, documents(5)) for number in (1, 2, 3)]

    (whole,) = run(journal, paths, {})
    (first,) = run(journal, paths[:1], {})
    (rest,) = run(journal, paths[1:], {first.table: first.state})

    assert rest.counts == {"events": 10, "sampled": 10, "hits": 10, "misses": 0, "drifted": 2}
    assert restored(OPTIONS, rest.state).state() == restored(OPTIONS, whole.state).state()
    assert rest.facts == whole.facts
    assert (whole.table, whole.facts["drift/public.orders"]) == ("public.orders", 3)


def test_what_goes_wrong_is_reported(journal: Journal) -> None:
    """A missing file keeps its class; a defect says where, and quotes nothing."""
    with pytest.raises(JournalDamaged, match="orders/uid/nothing"):
        run(journal, ["orders/uid/nothing.parquet"], {})
    path = written(journal, 1, documents(2))
    with pytest.raises(DeltaforgeError, match=r"^sensing broke: error in restored, line \d+$"):
        run(journal, [path], {"public.orders": b"no state of ours: 4711"})
