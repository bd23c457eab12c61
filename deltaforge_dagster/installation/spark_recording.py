"""Makes the archive of Spark's classes (`spark_classes`) from what a server of its own loads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from deltaforge_dagster.installation import spark_classes
from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.spark_server import JAVA_OPTIONS, SparkServer
from deltaforge_dagster.pipeline.spark_client import SparkSession


def record() -> bool:
    """Make the archive, unless it exists; return whether it was made, which takes half a minute.

    Raises:
        SettingsError: There is no Java.
        SparkUnavailable: Spark does not start, or Java makes no archive.
        OSError: The archive's folder cannot be written.
    """
    java = find_java()
    if spark_classes.archive(java).is_file():
        return False
    with tempfile.TemporaryDirectory(prefix="deltaforge-spark-") as name:
        folder = Path(name)
        class_list = folder / "classes"
        server = SparkServer.ensure(folder / "home", class_list=class_list)
        try:
            _use(server, folder)
        finally:
            server.stop()
        spark_classes.dump(java, JAVA_OPTIONS.split(), class_list)
    return True


def _use(server: SparkServer, folder: Path) -> None:
    """Do what every run does: read and write Parquet, and call Python with Arrow's batches."""
    session = SparkSession.builder.remote(server.remote).create()
    try:
        file = str(folder / "rows")
        session.range(10).selectExpr("id", "string(id) AS text").write.parquet(file)
        rows = session.read.parquet(file).where("id > 1")
        rows.mapInArrow(_unchanged, rows.schema).orderBy("id").collect()
    finally:
        session.stop()


def _unchanged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches
