"""Dagster assets of a pipeline: changes and sinks on range partitions, their checks and metadata."""
