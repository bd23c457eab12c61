"""What errors of Spark and of the formats mean, as Spark raises them: one table is held, or the sink fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deltaforge_dagster.errors import DeltaforgeError, SettingsError, SinkUnavailable, TableRejected
from deltaforge_dagster.pipeline.lake import writer
from deltaforge_dagster.pipeline.lake.spark_failures import SparkFailure, failure_of
from tests.fix_spark import SparkAddress
from tests.pipeline.lake.lake_tables import Lake, Staging
from tests.pipeline.lake.test_maintenance import maintenance

pytestmark = pytest.mark.spark

KEY, VALUE = 503, "Connection refused"
"""What is in no message, and is not taken for the failure of a server."""


@pytest.fixture
def lake(
    tmp_path: Path, spark_server: SparkAddress, request: pytest.FixtureRequest
) -> Iterator[Lake]:
    """An empty folder for tables of a format, Iceberg by default."""
    made = Lake(getattr(request, "param", "iceberg"), tmp_path, spark_server.remote)
    yield made
    made.close()


def failure(lake: Lake, space: str, *, exists: bool = False, **options: Any) -> DeltaforgeError:
    """The error of the first commit to a table, or of a later one."""
    staging = Staging(lake, "changelog", destination=(space, "t"))
    commit = staging.table(staging.step({"id": 1, "name": VALUE}))
    with pytest.raises(DeltaforgeError) as caught:
        lake.writer(mode="changelog", **options).commit(commit, 0, lambda: None, exists=exists)
    return caught.value


@pytest.mark.parametrize(
    "lake", [pytest.param("delta", marks=pytest.mark.soak("formats")), "iceberg"], indirect=True
)
def test_what_concerns_one_table(lake: Lake) -> None:
    """A table that is gone, damaged, where no folder can be, or partitioned by what is impossible."""
    staging, writer = Staging(lake, "current"), lake.writer()
    folder = lake.folder / "lake" / "public"
    changes = staging.table(staging.step({"id": KEY, "name": VALUE}))
    writer.commit(changes, 0, lambda: None)
    kept = shutil.move(folder / "orders", lake.folder / "kept")
    with pytest.raises(TableRejected, match=r"orders .*NOT_FOUND\)") as gone:
        writer.commit(changes, 1, lambda: None)
    shutil.move(kept, folder / "orders")
    for file in (folder / "orders").rglob("*.json"):
        file.write_text(f'{{"add": {KEY} {VALUE}')
        (file.parent / f".{file.name}.crc").unlink(missing_ok=True)
    with pytest.raises(TableRejected, match=r"orders .*caused by JsonParseException\)") as damaged:
        lake.writer().commit(changes, 1, lambda: None)
    assert not any(str(KEY) in str(one.value) for one in (gone, damaged))

    (folder.parent / "file").write_text("")
    assert "Spark cannot write there" in str(failure(lake, "file"))
    unknown = failure(lake, "unknown", partition_by={"public.orders": ("nothing",)})
    assert "cannot be partitioned by nothing, which shop.public.orders does not have" in str(
        unknown
    )
    unclustered = str(failure(lake, "unclustered", cluster_by={"public.orders": ("id", "nothing")}))
    assert "cannot be clustered by nothing, which shop.public.orders does not have" in unclustered
    assert unclustered.endswith("correct the sink's `cluster_by`")
    if lake.format == "iceberg":
        text = failure(lake, "text", partition_by={"public.orders": ("hours(name)",)})
        assert (type(text), "(ValidationException)" in str(text)) == (TableRejected, True)


@pytest.mark.parametrize(
    ("catalog", "error", "match"),
    [
        ({"catalog-impl": "no.such.Catalog"}, SettingsError, "cannot use the place"),
        ({"type": "hadoop", "warehouse": "odd://x/"}, SettingsError, "UnsupportedFileSystemException"),
        ({}, SettingsError, "REQUIRES_SINGLE_PART_NAMESPACE"),
        ({"type": "rest", "uri": "http://localhost:1"}, SinkUnavailable, "HttpHostConnectException: Connection refused)"),
    ],
)  # fmt: skip
def test_what_concerns_all_tables(
    lake: Lake, catalog: dict[str, str], error: type[DeltaforgeError], match: str
) -> None:
    """A catalog or storage that the server does not know, or that does not answer: no table is taken for missing."""
    given = {name: SecretStr(value) for name, value in catalog.items()}
    for exists in (False, True):
        found = failure(
            lake, "orders", exists=exists, catalog=f"c{len(given)}", catalog_properties=given
        )
        assert (type(found), match in str(found)) == (error, True)


@pytest.mark.parametrize("lake", ["delta"], indirect=True)
def test_files_where_a_table_should_be(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be those of another writer that creates it, so it is tried again before the table is held."""
    staging = Staging(lake, "changelog")
    commit = staging.table(staging.step({"id": 1, "name": VALUE}))
    file = lake.folder / "lake" / "public" / "orders" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("")
    failures: list[SparkFailure] = []

    def failed_twice(*given: Any) -> SparkFailure:
        failures.append(failure_of(*given))
        if len(failures) == 2:
            file.unlink()
        return failures[-1]

    with pytest.raises(TableRejected, match="files of something else where it should be"):
        lake.writer(mode="changelog").commit(commit, 0, lambda: None)
    assert maintenance(lake).maintain(("public", "orders")).notes == ["the table is gone"]
    monkeypatch.setattr(writer, "failure_of", failed_twice)
    lake.writer(mode="changelog").commit(commit, 0, lambda: None)

    assert failures == [SparkFailure.OCCUPIED] * 2
    assert len(lake.rows("id")) == 1
