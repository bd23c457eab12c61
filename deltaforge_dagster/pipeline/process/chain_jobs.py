"""A chain over segments as one Spark job: Python stages, and Spark SQL between them.

The job is one plan without a shuffle: `mapInArrow` for each stage, and a projection for each SQL
processor. So a segment stays in one task, and its rows in order.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from deltaforge_dagster.config.processors import SqlProcessor
from deltaforge_dagster.errors import DeltaforgeError, ProcessorFailed, SparkUnavailable
from deltaforge_dagster.pipeline.process.expressions import (
    SqlQuery,
    analysed,
    fragment,
    is_of_a_row,
    spark_schema,
)
from deltaforge_dagster.pipeline.process.stages import REPORT, SegmentJob, run_stage
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.pipeline.spark_session import SessionProvider, spark_condition
from deltaforge_dagster.processors.chain import ChainSpec
from deltaforge_dagster.processors.sql import columns_read, transit_schema


def run_job(
    sessions: SessionProvider, job: SegmentJob, numbers: int, tasks: int, subject: str
) -> pa.Table:
    """Have Spark's tasks run a chain over segments; return what they report.

    Args:
        sessions: Where the Spark session comes from.
        job: What is done with each segment.
        numbers: Number of segments.
        tasks: Number of tasks among which the segments are divided.
        subject: The segments, for error messages.

    Raises:
        SparkUnavailable: Server or session is gone, or the job failed; a retry may help.
        ProcessorFailed: A SQL expression fails for some row.
        SpecError: Spark refuses a SQL expression.
    """
    try:
        return _planned(sessions.session(), job, numbers, tasks).toArrow()
    except PySparkException as error:
        sessions.lost(error)
        # Not chained: Spark's text of a failed task may quote a value of a row.
        raise _translated(error, job.chain, subject) from None


def check_expressions(sessions: SessionProvider, chain: ChainSpec) -> None:
    """Have Spark analyse the SQL of a chain, before there are rows.

    Raises:
        SpecError: Spark refuses an expression.
        SparkUnavailable: No server answers.
    """
    for stage in chain.stages:
        if stage.sql is None:
            continue
        try:
            _query(sessions.session(), stage.sql)
        except PySparkException as error:
            sessions.lost(error)
            raise _translated(error, chain, f"processor {stage.sql.id}") from None


def _planned(session: SparkSession, job: SegmentJob, numbers: int, tasks: int) -> DataFrame:
    frame = session.range(0, numbers, 1, tasks)
    for number, stage in enumerate(job.chain.stages):
        if stage.sql is not None:
            frame = _query(session, stage.sql).over(frame)
        following = job.chain.sql_behind(number)
        schema = transit_schema(columns_read(following)) if following else REPORT
        frame = frame.mapInArrow(partial(run_stage, job, number), spark_schema(schema))
    return frame


_queries: dict[str, SqlQuery] = {}


def _query(session: SparkSession, processor: SqlProcessor) -> SqlQuery:
    """Return a SQL processor's query; Spark analyses each processor once."""
    text = processor.model_dump_json()
    if text not in _queries:
        _queries[text] = analysed(session, processor)
    return _queries[text]


def _translated(error: PySparkException, chain: ChainSpec, subject: str) -> DeltaforgeError:
    sql = [stage.sql.id for stage in chain.stages if stage.sql is not None]
    condition = spark_condition(error)
    if sql and is_of_a_row(error):
        return ProcessorFailed(
            f"processor {' or '.join(sql)}: {subject}: a row makes an expression fail: {condition}"
            f"{fragment(error)} (Spark's try_ functions give null instead)"
        )
    return SparkUnavailable(
        f"{subject}: the Spark job of the processors failed ({condition}); see the server's log"
    )
