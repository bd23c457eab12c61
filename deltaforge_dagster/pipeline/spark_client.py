"""The parts of PySpark's Connect client that are used; imported without pandas (`pandas_later`)."""

from __future__ import annotations

import logging
import os

from deltaforge_dagster.pipeline.pandas_later import standing_in_for_pandas

# Before grpc is imported, which would write notes about forks and missing proxies to standard
# error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

with standing_in_for_pandas():
    from pyspark.errors.exceptions.connect import SparkConnectGrpcException
    from pyspark.sql.connect import functions
    from pyspark.sql.connect.session import SparkSession

# These loggers of PySpark print Spark's error messages whole, including values of rows. They are
# silenced by level, because configuring logging later, as Dagster does, enables disabled loggers
# again.
for _name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

__all__ = ["SparkConnectGrpcException", "SparkSession", "functions"]
