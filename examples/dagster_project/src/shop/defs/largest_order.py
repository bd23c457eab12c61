"""An asset that is made again whenever the table of orders has new data."""

import os

import dagster as dg
import duckdb

from shop.defs.reports.template_vars import new_data
from shop.delta import EXTENSION


@dg.asset(
    deps=[dg.AssetKey(["raw", "orders"])], group_name="reports", automation_condition=new_data()
)
def largest_order() -> dg.MaterializeResult[None]:
    """Find the largest order."""
    with duckdb.connect() as connection:
        connection.load_extension(EXTENSION)
        row = connection.execute(
            "SELECT id, cents FROM delta_scan(?) ORDER BY cents DESC, id LIMIT 1",
            [f"{os.environ['LAKE']}/raw/orders"],
        ).fetchone()
    return dg.MaterializeResult(metadata={} if row is None else {"id": row[0], "cents": row[1]})
