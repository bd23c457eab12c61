"""The sources of a pipeline file (spec.source) and their connection strings."""
