"""What the product uses of PySpark's Connect client, which is imported here without pandas (`pandas_later`)."""

from __future__ import annotations

import os

from deltaforge_dagster.pipeline.pandas_later import standing_in_for_pandas

# Before grpc is imported, which would write notes about forks and missing proxies to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

with standing_in_for_pandas():
    from pyspark.errors.exceptions.connect import SparkConnectGrpcException
    from pyspark.sql.connect import functions
    from pyspark.sql.connect.session import SparkSession

__all__ = ["SparkConnectGrpcException", "SparkSession", "functions"]
