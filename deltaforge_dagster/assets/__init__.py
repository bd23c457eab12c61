"""Dagster assets of a pipeline: captured changes and sinks, partitioned by ranges, with checks and metadata."""
