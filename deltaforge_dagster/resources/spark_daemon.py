"""The parent of Spark's Python workers: imports what they need once, before it forks them.

Spark starts one such process per session and forks a worker for each task that finds no idle one
(an idle worker ends after a minute). Without this, each new worker would import pyarrow and
pandas again: most of a second before the first row. Named by `spark.python.daemon.module`.
"""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
from pyspark import daemon
from pyspark.sql.pandas import serializers, types

from deltaforge_dagster.pipeline import prepared_files

PRELOADED = (pa, pd, serializers, types, prepared_files)
"""Modules that a worker finds imported."""

if __name__ == "__main__":
    daemon.manager()
