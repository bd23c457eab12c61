"""A Dagster project beside DeltaForge: assets made of lake tables, on the same Spark server."""

from __future__ import annotations

import dagster as dg
from pyspark.sql import functions as sf

from deltaforge_dagster.resources.lake_spark import LakeSparkResource

ORDERS = dg.AssetKey(["shop", "lake", "main", "orders_lake"])
CUSTOMERS = dg.AssetKey(["shop", "lake", "main", "customers_lake"])


@dg.asset(
    key_prefix="reports",
    group_name="reports",
    deps=[ORDERS, CUSTOMERS],
    automation_condition=dg.AutomationCondition.eager(),
    kinds={"iceberg", "pyspark"},
)
def revenue(spark: LakeSparkResource) -> dg.MaterializeResult[None]:
    """What each customer has ordered, as a table of the same catalog: `lake.reports.revenue`."""
    orders = spark.table("lake", "main.orders")
    customers = spark.table("lake", "main.customers").select(sf.col("id").alias("customer"), "name")
    found = (
        orders.join(customers, "customer")
        .groupBy("name")
        .agg(sf.count("*").alias("orders"), sf.sum("cents").alias("cents"))
    )
    spark.spark_session.sql("CREATE NAMESPACE IF NOT EXISTS lake.reports")
    found.writeTo("lake.reports.revenue").using("iceberg").createOrReplace()

    table = spark.spark_session.table("lake.reports.revenue").orderBy("name")
    lines = ["| name | orders | cents |", "|---|---|---|"]
    lines += [f"| {row['name']} | {row['orders']} | {row['cents']} |" for row in table.collect()]
    return dg.MaterializeResult(
        metadata={
            "dagster/row_count": len(lines) - 2,
            "revenue": dg.MetadataValue.md("\n".join(lines)),
        }
    )


defs = dg.Definitions(
    assets=[revenue],
    resources={"spark": LakeSparkResource(pipeline="shop")},
    # Dagster's own sensor for automation conditions is off until somebody turns it on.
    sensors=[
        dg.AutomationConditionSensorDefinition(
            "follow_tables", target="*", default_status=dg.DefaultSensorStatus.RUNNING
        )
    ],
)
