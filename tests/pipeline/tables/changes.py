"""Changes of tables for the tests of staging, and a pipeline with such a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.tables.stage import TableStager
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.lake.sink_type import DELTA
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from deltaforge_dagster.typed_rows.schema import TargetTypes
from tests.pipeline.encode.test_encoder import OneSession
from tests.processors.rows import Row, dumps, row

PIPELINE = """
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/shop", slot: s, publication: p, tables: [a]}
  sinks:
    - type: delta
      config: {id: lake, path: /nowhere, OPTIONS}
"""


class HereSession:
    """Runs the functions of tasks in this process, each task with its own number, as Spark does."""

    def range(self, start: int, end: int, step: int, tasks: int) -> HereSession:
        """Note the numbers."""
        assert (start, end, step) == (0, tasks, 1)
        self._numbers = range(end)
        return self

    def mapInArrow(  # noqa: N802 - Spark's name
        self, run: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], _schema: str
    ) -> HereSession:
        """Run the tasks."""
        batches = [pa.RecordBatch.from_pydict({"id": [one]}) for one in self._numbers]
        self._made = [made for one in batches for made in run([one])]
        return self

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        """Return what they yielded."""
        names = ("report", "data", "error", "text")
        empty = pa.RecordBatch.from_pydict({name: [] for name in names})
        return pa.Table.from_batches(self._made or [empty])


def stager_here(
    folder: Path,
    journal: Journal,
    store: StateStore,
    options: str,
    types: TargetTypes | None = None,
) -> TableStager:
    """Return a stager for a sink with these options, whose tasks run in this process."""
    file = folder / "orders.yaml"
    file.write_text(PIPELINE.replace("OPTIONS", options))
    spec = load_pipeline(file).spec
    config = cast("LakeSinkConfig", spec.spec.sinks[0].config)
    sessions = OneSession(cast("SparkSession", HereSession()))
    return TableStager(
        spec, config, types or DELTA.column_types(), journal, sessions, store, "run-1"
    )


def change(op: str, pos: int, version: str | None, **images: Any) -> Row:
    """Return a change of `public.orders` with its images as objects; its key is that of the newest image."""
    texts = {name: None if image is None else dumps(image) for name, image in images.items()}
    newest = images.get("after") or images.get("before") or {}
    texts.setdefault("key", dumps({"id": newest["id"]}) if "id" in newest else None)
    return row(
        **{
            "op": op,
            "pos": pos,
            "before": None,
            "after": None,
            "schema_version": version,
            "ts_us": pos,
            **texts,
        }
    )


def table(*columns: str, name: str = "orders", type_: str = "integer") -> TableSchema:
    """Return a table version with columns of one type, the first one its primary key."""
    numbered = enumerate(columns, 1)
    made = tuple(Column(one, type_, None, False, number) for number, one in numbered)
    return TableSchema("shop", "public", name, made, columns[:1])
