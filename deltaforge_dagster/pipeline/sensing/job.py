"""The Spark job of sensing: one task examines segments, continuing from what was known before them.

One task takes all segments of a job, in order, because sampling depends on how many events came
before. An error is reported as a result and never as a failed task, which would make the run
replace a working Spark session.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from deltaforge_dagster import errors
from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sensing.learning import COLUMNS, Learned, SensedTables
from deltaforge_dagster.sensing.table import Versions

_COLUMNS: dict[str, pa.DataType] = {
    "learned": pa.string(),
    "state": pa.binary(),
    "error": pa.string(),
    "text": pa.string(),
}
REPORT = pa.schema(_COLUMNS)
"""One row for each table: its state, and the other fields of `Learned` as JSON.

After an error there is only one row, with the error.
"""


@dataclass(frozen=True, slots=True)
class SensingJob:
    """One Spark job.

    Attributes:
        options: The pipeline's `schema_sensing`.
        journal_url: Where the segments are.
        paths: Their files, in order.
        versions: By full table name, its registered versions.
        states: By full table name, the serialized findings so far.
    """

    options: SchemaSensing
    journal_url: str
    paths: Sequence[str]
    versions: Mapping[str, Versions]
    states: Mapping[str, bytes]

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Examine the segments; Spark calls this in a job with one task and one input row.

        Yields:
            Columns of `REPORT`.
        """
        for _ in numbers:
            try:
                rows = [_row(learned) for learned in self._learned()]
            except DeltaforgeError as error:
                rows = [{"error": type(error).__name__, "text": str(error)}]
            except Exception as error:  # noqa: BLE001 - its text may quote a value of a row
                frame = traceback.extract_tb(error.__traceback__)[-1]
                text = f"sensing broke: {type(error).__name__} in {frame.name}, line {frame.lineno}"
                rows = [{"error": DeltaforgeError.__name__, "text": text}]
            yield pa.RecordBatch.from_pylist(rows, REPORT)

    def report(self) -> pa.Table:
        """Examine the segments in this process; return what a Spark task would."""
        return pa.Table.from_batches(self.run([pa.RecordBatch.from_pylist([{"id": 0}])]), REPORT)

    def _learned(self) -> list[Learned]:
        journal = Journal(self.journal_url)
        tables = SensedTables(self.options, self.versions, self.states)
        for path in self.paths:
            for batch in journal.share(path, COLUMNS, ordinals=None, part=0, of=1):
                tables.accept(batch)
        return tables.learned()


def learned_by(report: pa.Table) -> list[Learned]:
    """Return what the task has reported.

    Raises:
        DeltaforgeError: The error that the task reported.
    """
    rows = report.to_pylist()
    for row in rows:
        if row["error"] is not None:
            raise getattr(errors, row["error"])(row["text"])
    return [Learned(state=row["state"], **json.loads(row["learned"])) for row in rows]


def _row(learned: Learned) -> dict[str, str | bytes]:
    rest = asdict(learned)
    return {"state": rest.pop("state"), "learned": json.dumps(rest)}
