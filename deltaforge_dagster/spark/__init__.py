"""The sinks as Spark data sources for any Spark job: `df.write.format("deltaforge_redis")`.

::

    from deltaforge_dagster.spark import register

    register(spark, secrets={"REDIS_PASSWORD": password})
    (
        df.selectExpr("id AS key", "to_json(struct(*)) AS value")
        .write.format("deltaforge_redis")
        .option("uri", "redis://:${REDIS_PASSWORD}@redis.example:6379/0")
        .option("stream", "orders")
        .mode("append")
        .save()
    )

Every kind of sink is a data source, unless it says otherwise (`sinks.registry`). A task opens the
same sink that pipelines use and sends the rows of its partition in order. See `options` for the
options, `rows` for the columns, and `writer` for the guarantees when tasks are retried. Spark
Connect sessions and classic sessions are supported. This package, and that of the sink, must be
installed where the tasks run.
"""

from deltaforge_dagster.spark import register

__all__ = ["register"]
