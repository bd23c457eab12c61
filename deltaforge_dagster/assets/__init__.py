"""Dagster assets of a pipeline: changes and sinks, partitioned by ranges, checks and metadata."""
