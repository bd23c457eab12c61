"""Dagster assets of a pipeline: changes and sinks, by ranges, with checks and metadata."""
