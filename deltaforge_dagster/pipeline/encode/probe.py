"""Check that an external Spark server has our package and the journal's folder.

One small job checks this once for each session on a server that the installation did not start. A
wrong image, or a volume that is not mounted there, is then reported by a clear error and not by a
failed task. Workers import this module, too.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.errors import PythonException

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.spark_client import SparkSession


def write_probe(path: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Write a file as encoded messages are written, and yield this worker's version."""
    for _ in batches:
        encoded_files.write_bytes(path, __version__.encode())
        yield pa.RecordBatch.from_pydict({"version": [__version__]})


def check_server(session: SparkSession, folder: str, prefix: str) -> None:
    """Verify that executors have our version, and share the folder of encoded files with this run.

    Args:
        session: A session on the server.
        folder: Absolute path, or a URL that fsspec knows.
        prefix: Prefix of the probe file's name, so that a leftover one is swept.

    Raises:
        SettingsError: They have another version or do not share the folder; the message says what
            to fix.
        PySparkException: The server or the session is gone.
    """
    path = f"{folder}/{prefix}.{uuid.uuid4().hex}.probe.arrow"
    probe = functools.partial(write_probe, path)
    try:
        answer = session.range(0, 1, 1, 1).mapInArrow(probe, "version string").toArrow()
    except PythonException as error:
        raise SettingsError(_explained(str(error), folder)) from None
    (version,) = answer["version"].to_pylist()
    if version != __version__:
        encoded_files.remove(path)
        raise SettingsError(
            f"the Spark executors have deltaforge-dagster {version}, this run is {__version__}: "
            "install the same version in their image"
        )
    if not encoded_files.exists(path):
        raise SettingsError(
            f"the Spark executors do not share {folder} with this run: put the journal on a "
            "volume that both mount, or on object storage (DELTAFORGE_JOURNAL_URL)"
        )
    encoded_files.remove(path)


def _explained(text: str, folder: str) -> str:
    if "No module named 'deltaforge_dagster" in text:
        return (
            f"the Spark executors lack our package: install deltaforge-dagster {__version__} in "
            "their image"
        )
    return f"the Spark executors cannot write to {folder}, where encoded messages go"
