"""What a Spark task does for sensing: segments, after what was known before them.

One task takes all segments of a job, in order, since which events are looked at depends on how many came
before. It never fails for Spark: what goes wrong is reported, so that no server or session is
suspected that delivers well.

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
"""A row for each table: its state, and the rest of `Learned` as JSON; or one row that says what went wrong."""


@dataclass(frozen=True, slots=True)
class SensingJob:
    """One Spark job.

    Attributes:
        options: The pipeline's `schema_sensing`.
        journal_url: Where the segments are.
        paths: Their files, in order.
        versions: The registered versions of tables, by full names.
        states: What was known of tables before.
    """

    options: SchemaSensing
    journal_url: str
    paths: Sequence[str]
    versions: Mapping[str, Versions]
    states: Mapping[str, bytes]

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Learn from the segments; what Spark maps over the one number of its one task.

        Yields:
            Columns of `REPORT`.
        """
        for _ in numbers:
            try:
                rows = [_row(one) for one in self._learned()]
            except DeltaforgeError as error:
                rows = [{"error": type(error).__name__, "text": str(error)}]
            except Exception as error:  # noqa: BLE001 - its text may quote a value of a row
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = f"sensing broke: {type(error).__name__} in {place.name}, line {place.lineno}"
                rows = [{"error": DeltaforgeError.__name__, "text": text}]
            yield pa.RecordBatch.from_pylist(rows, REPORT)

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
        DeltaforgeError: What went wrong in it.
    """
    rows = report.to_pylist()
    for row in rows:
        if row["error"] is not None:
            raise getattr(errors, row["error"])(row["text"])
    return [Learned(state=row["state"], **json.loads(row["learned"])) for row in rows]


def _row(learned: Learned) -> dict[str, str | bytes]:
    rest = asdict(learned)
    return {"state": rest.pop("state"), "learned": json.dumps(rest)}
