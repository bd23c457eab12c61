"""Spark reads a segment's file as plain columns, with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.journal.files import Journal
from tests.journal.changes import batch, change, changes

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

pytestmark = pytest.mark.spark


def test_spark_reads_the_frame(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are strings, numbers are bigint, and every value and null is as written.

    The journal is in a directory whose name has characters with a meaning in a Hadoop path.
    """
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 64 << 10)
    journal = Journal((tmp_path / "my [journal] {a} 50%").as_uri())
    writer = journal.writer("shop", "u1", 7, 3)
    writer.write(changes(0, 1500))
    for number in range(1500, 1600):
        writer.write(batch([change(number, table=f"t{number}", file=f"log.{number}")]))
    written = writer.close()

    frame = spark.read.parquet(journal.spark_path(written.path))
    found = frame.orderBy("ordinal").toArrow()

    types = {"string": "string", "int64": "bigint", "bool": "boolean"}
    expected = {
        field.name: "string" if pa.types.is_dictionary(field.type) else types[str(field.type)]
        for field in FRAME
    }
    assert expected == dict(frame.dtypes)
    with journal.open(written.path) as file:
        assert file.num_row_groups > 1
        assert file.read().to_pylist() == found.to_pylist()


def test_spark_selects_row_groups(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a segment can be selected by ordinal."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 64 << 10)
    journal = Journal(f"file://{tmp_path}/journal")
    writer = journal.writer("shop", "u1", 7, 3)
    writer.write(changes(0, 1500))
    written = writer.close()

    frame = spark.read.parquet(journal.spark_path(written.path)).where("ordinal >= 1200")

    assert frame.count() == 300
