"""Tests of what `deltaforge check` says about tables of a lakehouse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig, IcebergSinkConfig
from deltaforge_dagster.sinks.lake.sink_type import DELTA, ICEBERG
from deltaforge_dagster.sinks.registry import SinkContext
from deltaforge_dagster.sources.findings import Finding


def checked(config: DeltaSinkConfig | IcebergSinkConfig) -> list[Finding]:
    """Return the findings about a sink."""
    kind: Any = DELTA if isinstance(config, DeltaSinkConfig) else ICEBERG
    return list(kind.preflight(config, SinkContext("shop", brief=True), ["public.orders"]))


def warehouse(location: str) -> IcebergSinkConfig:
    """Return an Iceberg sink whose catalog is a folder."""
    properties: Any = {"type": "hadoop", "warehouse": location}
    return IcebergSinkConfig(id="lake", catalog_properties=properties)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_of_this_machine(tmp_path: Path, scheme: str) -> None:
    """A folder that does not exist yet will be made; a file in its place is an error."""
    (tmp_path / "file").touch()

    for folder, file in (
        [
            DeltaSinkConfig(id="lake", path=f"{scheme}{tmp_path}/{name}")
            for name in ("a/b", "file/b")
        ],
        [warehouse(f"{scheme}{tmp_path}/{name}") for name in ("a/b", "file/b")],
    ):
        assert checked(folder) == [
            Finding("sink lake", "ok", f"tables in {tmp_path}/a/b will be made")
        ]
        (error,) = checked(file)
        assert (error.level, error.text) == ("error", f"{tmp_path}/file is no directory")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("config", "place"),
    [
        (DeltaSinkConfig(id="lake", path="s3a://bucket/lake"), "path s3a://bucket/lake"),
        (DeltaSinkConfig(id="lake", catalog="main"), "catalog main"),
        (IcebergSinkConfig(id="lake", catalog="prod"), "catalog prod"),
        (warehouse("hdfs://h/lake"), "catalog lake, warehouse hdfs://h/lake"),
    ],
)
def test_what_only_spark_reaches(config: DeltaSinkConfig | IcebergSinkConfig, place: str) -> None:
    """Elsewhere the check writes nothing, and says that it cannot know."""
    assert checked(config) == [
        Finding("sink lake", "note", f"only a run shows whether Spark can write to {place}")
    ]
