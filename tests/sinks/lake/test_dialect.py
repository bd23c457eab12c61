"""Tests of the settings of sessions that read and write tables of a lakehouse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig, IcebergSinkConfig
from deltaforge_dagster.sinks.lake.delta import DeltaDialect
from deltaforge_dagster.sinks.lake.dialect import session_settings, writer_settings
from deltaforge_dagster.sinks.lake.iceberg import IcebergDialect

JOINS = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
WRITES = "spark.sql.iceberg.advisory-partition-size"


def dialect(kind: str, **options: Any) -> DeltaDialect | IcebergDialect:
    """Return the dialect of a sink with these options."""
    if kind == "delta":
        return DeltaDialect(DeltaSinkConfig(id="lake", path="/lake", **options))
    catalog: Any = {"type": "hadoop", "warehouse": "/lake"}
    return IcebergDialect(IcebergSinkConfig(id="lake", catalog_properties=catalog, **options))


def written_with(kind: str, **options: Any) -> Mapping[str, str]:
    """Return the settings with which such a sink writes."""
    found = dialect(kind, **options)
    return writer_settings(found, found.config)


@pytest.mark.parametrize(
    ("mode", "size"), [("merge_on_read", 16 << 20), ("copy_on_write", 64 << 20)]
)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tasks_are_as_large_as_what_a_commit_writes(
    kind: str, mode: Literal["merge_on_read", "copy_on_write"], size: int
) -> None:
    """Small where only what has changed is written, so that all processors do it; large where whole files are."""
    settings = written_with(kind, write_mode=mode)

    assert int(settings[JOINS]) == size
    assert int(settings.get(WRITES, size)) == size


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_one_session_reads_the_tables_of_sinks_that_write_in_different_ways(kind: str) -> None:
    """Its settings are the same for both; people's assets have such a session (`LakeSparkResource`)."""
    marking, rewriting = (
        dialect(kind, write_mode=mode) for mode in ("merge_on_read", "copy_on_write")
    )

    assert session_settings(marking, marking.config) == session_settings(
        rewriting, rewriting.config
    )


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_setting_of_the_sink_is_the_last(kind: str) -> None:
    """An option `spark` of the sink overrides what is set otherwise."""
    assert written_with(kind, spark={JOINS: "1MB"})[JOINS] == "1MB"
