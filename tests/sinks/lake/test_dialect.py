"""Tests of the settings of sessions that read and write tables of a lakehouse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig, IcebergSinkConfig
from deltaforge_dagster.sinks.lake.delta import DeltaDialect
from deltaforge_dagster.sinks.lake.dialect import session_settings
from deltaforge_dagster.sinks.lake.iceberg import IcebergDialect

JOINS = "spark.sql.adaptive.advisoryPartitionSizeInBytes"
WRITES = "spark.sql.iceberg.advisory-partition-size"


def settings_of(kind: str, **options: Any) -> Mapping[str, str]:
    """Return the settings for a sink with these options."""
    if kind == "delta":
        delta = DeltaSinkConfig(id="lake", path="/lake", **options)
        return session_settings(DeltaDialect(delta), delta)
    catalog: Any = {"type": "hadoop", "warehouse": "/lake"}
    iceberg = IcebergSinkConfig(id="lake", catalog_properties=catalog, **options)
    return session_settings(IcebergDialect(iceberg), iceberg)


@pytest.mark.parametrize(
    ("mode", "size"), [("merge_on_read", 16 << 20), ("copy_on_write", 64 << 20)]
)
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_tasks_are_as_large_as_what_a_commit_writes(
    kind: str, mode: Literal["merge_on_read", "copy_on_write"], size: int
) -> None:
    """Small where only what has changed is written, so that all processors do it; large where whole files are."""
    settings = settings_of(kind, write_mode=mode)

    assert int(settings[JOINS]) == size
    assert int(settings.get(WRITES, size)) == size


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_setting_of_the_sink_is_the_last(kind: str) -> None:
    """What its file says is set whatever the format would set."""
    assert settings_of(kind, spark={JOINS: "1MB"})[JOINS] == "1MB"
