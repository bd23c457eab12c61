"""A Spark server elsewhere: what it must have, and how its lack is said."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.encoder import check_server

pytestmark = pytest.mark.spark


def test_a_fit_server_passes_and_nothing_is_left(spark: SparkSession, tmp_path: Path) -> None:
    """The same package and a shared folder: no error, and the probe's file is gone."""
    check_server(spark, str(tmp_path), "run")

    assert list(tmp_path.iterdir()) == []


def test_another_version_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors with another version of the package are refused, with both versions."""
    monkeypatch.setattr(encoder, "__version__", "99.0")

    with pytest.raises(SettingsError, match=r"have deltaforge-dagster .*, this run is 99\.0"):
        check_server(spark, str(tmp_path), "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_only_we_have_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that executors cannot write to is one sentence; here, one relative to our place."""
    monkeypatch.chdir(tmp_path)
    Path("prepared").mkdir()

    with pytest.raises(SettingsError, match="cannot write to prepared"):
        check_server(spark, "prepared", "run")


def test_a_folder_that_is_another_there_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors wrote, and we do not see it: the folder is not shared, and the error says so."""
    monkeypatch.setattr(encoded_files, "exists", lambda _path: False)

    with pytest.raises(SettingsError, match="do not share"):
        check_server(spark, str(tmp_path), "run")


def test_a_server_without_our_package_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors that cannot import what the job needs: the error says what to install."""
    package = tmp_path / "here" / "deltaforge_dagster_elsewhere"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def write_probe(path, batches):\n    yield from batches\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    import deltaforge_dagster_elsewhere as elsewhere  # type: ignore[import-not-found]  # noqa: PLC0415 - made here

    monkeypatch.setattr(encoder, "write_probe", elsewhere.write_probe)

    with pytest.raises(SettingsError, match="lack our package: install deltaforge-dagster"):
        check_server(spark, str(tmp_path), "run")
    del sys.modules["deltaforge_dagster_elsewhere"]


def test_a_worker_answers_once_for_its_one_row(tmp_path: Path) -> None:
    """The worker's part writes its version where it is told, and yields it."""
    rows: Iterable[pa.RecordBatch] = [pa.RecordBatch.from_pydict({"id": [0]})]
    answers: Iterator[pa.RecordBatch] = encoded_files.write_probe(
        str(tmp_path / "x.probe.arrow"), rows
    )

    assert [answer.to_pydict() for answer in answers] == [{"version": [__version__]}]
    assert (tmp_path / "x.probe.arrow").read_text() == __version__
