"""Tests of the options of Delta and Iceberg sinks."""

from __future__ import annotations

from typing import Any

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SpecError, TableRejected
from deltaforge_dagster.sinks.lake.config import (
    DeltaSinkConfig,
    IcebergSinkConfig,
    LakeMaintenanceConfig,
    LakeSinkConfig,
    PartitionField,
    TableLayout,
    partition_field,
)
from deltaforge_dagster.sinks.tables.config import PendingChanges
from deltaforge_dagster.sources.value_types import INT64, TEXT
from tests.config.conftest import Write, write

__all__ = ["write"]

FOLDER = {"type": "hadoop", "warehouse": "/lake"}


def delta(**options: Any) -> dict[str, Any]:
    """Return the block of a Delta sink with tables in a folder, unless `options` say otherwise."""
    return {"type": "delta", "config": {"id": "lake", "path": "/lake", **options}}


def iceberg(**options: Any) -> dict[str, Any]:
    """Return the block of an Iceberg sink."""
    return {"type": "iceberg", "config": {"id": "lake", "catalog_properties": FOLDER, **options}}


def loaded(write: Write, sink: dict[str, Any]) -> LakeSinkConfig:
    """Return the options of a sink that a file declares."""
    pipeline = load_pipeline(write({"spec.sinks.1": sink}))
    assert pipeline.warnings == ()
    config = pipeline.spec.spec.sinks[1].config
    assert isinstance(config, LakeSinkConfig)
    return config


def test_defaults(write: Write) -> None:
    """A path or a warehouse is enough: the rows as they are now, in tables named like the source's."""
    table, lake = loaded(write, delta()), loaded(write, iceberg())

    assert isinstance(table, DeltaSinkConfig)
    assert isinstance(lake, IcebergSinkConfig)
    for one in (table, lake):
        assert (one.mode, one.write_mode) == ("current", "merge_on_read")
        assert (one.commit_seconds, one.commit_changes) == (60, 1_000_000)
        assert one.name_of("app", "public", "orders") == ("public", "orders")
    assert (lake.catalog, lake.warehouse) == ("lake", "/lake")
    assert table.maintenance == lake.maintenance == LakeMaintenanceConfig()
    assert not table.type_widening


@pytest.mark.parametrize("off", ["off", False, {"enabled": False}])
def test_maintenance_can_be_off(write: Write, off: object) -> None:
    """As text, as YAML 1.1 reads it, and as it is stored."""
    assert loaded(write, delta(maintenance=off)).maintenance == LakeMaintenanceConfig(enabled=False)


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (delta(table="${source.table}_${op}"), "config.table: names ${op}, which differs between the changes of one table (only ${source.db}, ${source.schema} and ${source.table} are allowed)"),
        (delta(table="${source.schema}.all"), "config.table: has a variable, but not ${source.table}, so tables would be mixed (add it, or write the name of one table)"),
        (delta(table="a..${source.table}"), "config.table: is not the name of a table: parts of letters, digits, `_`, `-` and variables, with a dot between them, such as ${source.schema}.${source.table}"),
        (delta(table="../${source.table}"), "config.table: is not the name of a table: parts of letters, digits, `_`, `-` and variables, with a dot between them, such as ${source.schema}.${source.table}"),
        (delta(mode="scd2"), "config.mode: must be 'changelog', 'current' or 'history'"),
        (delta(commit_seconds=0), "config.commit_seconds: must be more than 0"),
        (delta(maintenance="on"), "config.maintenance: must be a block of fields"),
        (delta(maintenance={"schedule": "daily"}), "config.maintenance.schedule: has 1 fields, a schedule has five"),
        (delta(maintenance={"retention_hours": 23}), "config.maintenance.retention_hours: must be at least 24"),
        (delta(commit_changes=0), "config.commit_changes: must be more than 0"),
        (delta(types={"public.orders": {"total": "money"}}), "config.types.public.orders.total: there is no type 'money'; known are "),
        (delta(types={"orders": {"total": "text"}}), "config.types.orders.[key]: names the table 'orders' (write schema.table, or database.table if the source has no schemas)"),
        (delta(keys={"public.orders": []}), "config.keys.public.orders: must have at least one entry"),
        (delta(keys={"public.orders": ["a", "a"]}), "config.keys.public.orders: names a column twice"),
        (delta(soft_deletes=True, mode="history"), "config: soft_deletes needs mode: current (mode history keeps deleted rows anyway)"),
        (delta(path="lake"), "config.path: is not absolute (write the whole path, or a URL: Spark may run in another directory)"),
        (delta(path="s3a://me:geheim@bucket"), "config.path: holds a password, which others would see (put it under `spark`)"),
        (delta(catalog="main"), "config: needs either `path` or `catalog`: where the tables are"),
        (delta(path=None), "config: needs either `path` or `catalog`: where the tables are"),
        (delta(path=None, catalog="a.b"), "config.catalog: is not the name of a catalog (letters, digits and `_`)"),
        (delta(path=None, catalog="main", table="${source.table}"), "config: table ${source.table} is not schema.table, as names of Delta tables in a catalog are"),
        (delta(partition_by={"public.orders": ["day"]}, cluster_by={"public.orders": ["id"]}), "config: cluster_by public.orders: Delta tables that are partitioned cannot be clustered (leave one of them out)"),
        (delta(partition_by={"public.orders": ["days(day)"]}), "config: partition_by days(day): Delta tables are partitioned by columns only (a transform needs an Iceberg table)"),
        (delta(spark={"spark.databricks.delta.write.txnVersion": 1}), "config.spark: sets spark.databricks.delta.write.txnVersion, which the sink sets itself, because tables would become wrong"),
        (delta(spark={"spark.sql.session.timeZone": "CET"}), "config.spark: sets spark.sql.session.timeZone, which the sink sets itself, because tables would become wrong"),
        (iceberg(spark={"spark.sql.catalog.lake.cache-enabled": True}), "config.spark: sets spark.sql.catalog.lake.cache-enabled, which the sink sets itself, because tables would become wrong"),
        (delta(properties={"deltaforge.owner": "me"}), "config.properties: sets deltaforge.owner, but names that begin with deltaforge. are the sink's"),
        (iceberg(catalog_properties={}), "config: needs `catalog_properties` (without a server: type: hadoop, and a folder as warehouse), or `catalog`, the name of a catalog that the Spark server knows"),
        (iceberg(catalog_properties={"warehouse": "/lake"}), "config: catalog_properties has no `type`: hadoop, hive, rest, jdbc or glue"),
        (iceberg(catalog_properties={"type": "hadoop"}), "config: catalog_properties has no `warehouse`: the folder of the tables"),
        (iceberg(catalog_properties={"type": "hadoop", "warehouse": "lake"}), "config: catalog_properties: warehouse is not absolute (write the whole path, or a URL: Spark may run in another directory)"),
        (iceberg(catalog_properties={**FOLDER, "cache-enabled": True}), "config: catalog_properties sets cache-enabled, which is always false: a cache would hide the commits of other runs"),
        (iceberg(table="${source.table}"), "config: table ${source.table} has no namespace (write schema.table: an Iceberg catalog has tables in namespaces only)"),
    ],
)  # fmt: skip
def test_each_mistake_has_its_sentence(write: Write, sink: dict[str, Any], said: str) -> None:
    """One mistake gives one problem, which says what to write instead and shows no secret."""
    path = write({"spec.sinks.1": sink})

    with pytest.raises(SpecError) as raised:
        load_pipeline(path)

    (problem,) = raised.value.problems
    assert f"spec.sinks[1].{said}" in problem
    assert "geheim" not in problem


def test_what_messages_have_is_unknown(write: Write) -> None:
    """A key or an envelope would have no effect: the file says so."""
    path = write({"spec.sinks.1": delta(key="${key.id}", envelope="debezium")})

    warnings = load_pipeline(path).warnings

    assert [one.split(": ")[1] for one in warnings] == [
        "spec.sinks[1].config.key",
        "spec.sinks[1].config.envelope",
    ]


@pytest.mark.parametrize(
    ("template", "database", "schema", "name"),
    [
        ("${source.schema}.${source.table}", "shop", None, ("shop", "orders")),
        ("${source.db}.${source.schema}.${source.table}", "app", "public", ("app", "public", "orders")),
        ("raw.${source.schema}_${source.table}", "app", "public", ("raw", "public_orders")),
        ("bronze.everything", "app", "public", ("bronze", "everything")),
    ],
)  # fmt: skip
def test_names_of_tables(
    template: str, database: str, schema: str | None, name: tuple[str, ...]
) -> None:
    """Dots of the template divide a name; without schemas, the database stands for the schema."""
    config = DeltaSinkConfig(id="lake", path="/lake", table=template)

    assert config.name_of(database, schema, "orders") == name
    assert config.name_parts == len(name)


def test_names_that_cannot_be_folders() -> None:
    """A dot in a table's name divides nothing; a name that would leave the folder is rejected."""
    config = DeltaSinkConfig(id="lake", path="/lake")

    assert config.name_of("app", "public", "a.b") == ("public", "a.b")
    for name in ("..", ".", "a/b", "a\\b", "a\nb", ""):
        with pytest.raises(TableRejected, match="cannot be part of a table's name"):
            config.name_of("app", "public", name)


def test_options_of_a_table(write: Write) -> None:
    """Keys, types and partitions are declared under `schema.table`, or `database.table` without schemas."""
    config = loaded(
        write,
        iceberg(
            keys={"public.orders": ["id", "day"]},
            types={"public.orders": {"total": "text", "n": "int64"}, "shop.a.b": {"c": "text"}},
            partition_by={"public.orders": ["days(day)", "bucket( 16 , id)", "kind"]},
            cluster_by={"public.orders": ["customer", "total"]},
        ),
    )

    assert config.keys_of("app", "public", "orders") == ("id", "day")
    assert config.keys_of("public", None, "orders") == ("id", "day")
    assert config.keys_of("app", "other", "orders") is None
    assert config.types_of("app", "public", "orders") == {"total": TEXT, "n": INT64}
    assert config.types_of("shop", None, "a.b") == {"c": TEXT}
    assert config.types_of("app", "public", "items") == {}
    assert config.layout_of("app", "public", "orders") == TableLayout(
        (PartitionField("day", "days"), PartitionField("id", "bucket", 16), PartitionField("kind")),
        ("customer", "total"),
    )
    assert config.layout_of("app", "public", "items") == TableLayout()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("Year(at)", PartitionField("at", "years")),
        ("hours( at )", PartitionField("at", "hours")),
        ("truncate(4, code)", PartitionField("code", "truncate", 4)),
        ("days", PartitionField("days")),
    ],
)
def test_partition_fields(text: str, field: PartitionField) -> None:
    """Transforms may be written in the singular; a column may have the name of one."""
    assert partition_field(text) == field


def test_secrets_are_masked(write: Write) -> None:
    """Credentials under `spark` and in the catalog's properties are in no plan and no asset."""
    secret = {"fs.s3a.secret.key": "geheim", "n": 5, "on": True}
    sink = iceberg(
        spark=secret,
        catalog_properties={"type": "rest", "uri": "https://u:geheim@h", "token": "geheim"},
    )

    pipeline = load_pipeline(write({"spec.sinks.1": sink}))

    shown = pipeline.spec.masked()["spec"]["sinks"][1]["config"]
    assert shown["spark"] == {"fs.s3a.secret.key": "***", "n": "5", "on": "true"}
    assert shown["catalog_properties"] == {
        "type": "rest",
        "uri": "https://u:***@h",
        "token": "***",
    }
    assert "geheim" not in repr(pipeline)


def test_a_catalog_of_the_server(write: Write) -> None:
    """Without properties the named catalog is one that the Spark server has."""
    sink = {"type": "iceberg", "config": {"id": "lake", "catalog": "prod"}}

    config = loaded(write, sink)

    assert isinstance(config, IcebergSinkConfig)
    assert (config.catalog, config.warehouse) == ("prod", None)


def test_pending_changes(write: Write) -> None:
    """`true` takes the defaults."""
    for given, expected in (
        (True, PendingChanges()),
        ({"fold_changes": 5}, PendingChanges(fold_changes=5)),
        (False, None),
    ):
        config = loaded(write, iceberg(pending=given))
        assert isinstance(config, IcebergSinkConfig)
        assert config.pending == expected
    pending = PendingChanges(fold_changes=5, fold_seconds=60)
    assert [pending.due(*one) for one in ((5, 0), (4, 60), (4, 59))] == [True, True, False]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "changelog"}, "has no use in mode changelog"),
        ({"mode": "history"}, "a history cannot be folded"),
        ({"soft_deletes": True}, "exclude each other"),
    ],
)
def test_where_changes_cannot_be_pending(
    write: Write, options: dict[str, Any], reason: str
) -> None:
    """Other modes, and tables that keep deleted rows."""
    with pytest.raises(SpecError, match=reason):
        loaded(write, iceberg(pending=True, **options))
