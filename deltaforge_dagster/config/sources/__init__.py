"""`spec.source`: the sources of a pipeline file and their connection strings."""
