"""Where objects are."""

from __future__ import annotations

import datetime as dt

import pytest

from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.objects.writer import object_path
from deltaforge_dagster.sinks.tables.staged import ObjectPart
from deltaforge_dagster.sinks.tables.writer import TableOwner

OWNER = TableOwner("uid", "shop", "files")
TABLE = ("shop", "public", "orders")
PART = ObjectPart(int(dt.datetime(2024, 2, 9, 7, tzinfo=dt.UTC).timestamp()), "sha256:00")


def path(
    folder: str = "x",
    owner: TableOwner = OWNER,
    table: tuple[str, str | None, str] = TABLE,
    part: ObjectPart = PART,
    through: int = 12,
) -> str:
    """Return the path of an object."""
    config = S3SinkConfig(id="files", bucket="b", folder=folder)
    return object_path(config, owner, table, part, through)


def test_the_default_folder() -> None:
    """By table and date, as Hive and everything since names partitions."""
    config = S3SinkConfig(id="files", bucket="b")
    found = object_path(config, OWNER, TABLE, PART, 12)
    folder, _, name = found.rpartition("/")
    assert folder == "table=orders/year=2024/month=02/day=09"
    assert name.startswith("000000000012-")
    assert name.endswith(".parquet")


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("${source.db}/${source.schema}.${source.table}/dt=${time.year}-${time.month}-${time.day}T${time.hour}", "shop/public.orders/dt=2024-02-09T07"),
        ("all", "all"),
    ],
)  # fmt: skip
def test_folders(folder: str, expected: str) -> None:
    """Every variable has its value."""
    assert path(folder).rpartition("/")[0] == expected


def test_a_source_without_schemas() -> None:
    """Its database stands for the schema."""
    assert path("${source.schema}", table=("shop", None, "orders")).startswith("shop/")


def test_names_differ() -> None:
    """For whatever may not be in one object; and are the same for the same."""
    made = [
        path(),
        path(owner=TableOwner("other", "shop", "files")),
        path(owner=TableOwner("uid", "shop", "others")),
        path(table=("shop", "private", "orders")),
        path(table=("shop", "public", "items")),
        path(part=ObjectPart(PART.began, "sha256:01")),
        path(part=ObjectPart(PART.began, None)),
        path(part=ObjectPart(PART.began, "sha256:00", 0)),
        path(part=ObjectPart(PART.began, "sha256:00", 1)),
        path(through=13),
    ]
    assert len(set(made)) == len(made)
    assert path() == made[0]


def test_names_sort_as_commits() -> None:
    """Up to a million million segments."""
    made = [path(through=number) for number in (9, 10, 123_456, 999_999_999_999)]
    assert sorted(made) == made


def test_names_sort_as_the_runs_of_a_commit() -> None:
    """Up to a million table versions one after another, between the commits before and after."""
    runs = [
        PART,
        *(ObjectPart(PART.began, f"sha256:{n % 3}", n) for n in (0, 1, 2, 9, 10, 999_999)),
    ]
    made = [path(part=part, through=12 + (part.run is not None)) for part in runs]
    made.append(path(through=14))
    assert sorted(made) == made


def test_a_name_is_what_it_was() -> None:
    """Of a table with one version in a commit: a commit that an older release has begun is finished as it is."""
    assert path() == "x/000000000012-68fbe98f47e791ff.parquet"
