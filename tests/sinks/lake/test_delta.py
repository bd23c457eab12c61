"""Tests of the statements that Delta's dialect makes."""

from __future__ import annotations

import re

import pytest

from deltaforge_dagster.sinks.lake.config import DeltaSinkConfig, PartitionField, TableLayout
from deltaforge_dagster.sinks.lake.delta import DeltaDialect
from deltaforge_dagster.sinks.lake.dialect import LakeColumn

COLUMNS = [
    LakeColumn("Id", "string", is_key=True),
    LakeColumn("day", "date"),
    LakeColumn("total", "decimal(12,2)"),
    LakeColumn("a, b", "bigint"),
    LakeColumn("City", "string"),
    LakeColumn("paid", "boolean"),
    LakeColumn("tags", "array<string>"),
    LakeColumn("df_position", "bigint"),
]


@pytest.mark.parametrize(
    ("layout", "columns"),
    [
        (TableLayout(), "`Id`,`day`,`total`,`a, b`,`df_position`"),
        (TableLayout(cluster_by=("city",)), "`Id`,`day`,`total`,`a, b`,`City`,`df_position`"),
        (
            TableLayout(partition_by=(PartitionField("day"),)),
            "`Id`,`total`,`a, b`,`df_position`",
        ),
    ],
)
def test_files_have_the_limits_of_what_is_looked_for(layout: TableLayout, columns: str) -> None:
    """Numbers, dates and times have them; texts only of keys, and where the table is clustered by them."""
    dialect = DeltaDialect(DeltaSinkConfig(id="lake", path="/lake", table="t"))

    made = dialect.create(("t",), COLUMNS, layout, {}, replace=False)

    found = re.search("'delta.dataSkippingStatsColumns' = '([^']*)'", made)
    assert found is not None
    assert found[1] == columns
