"""Decisions about pipelines, for sensors, commands, the API and the run.

`catalog` lists the pipelines, `work` tells whether one needs a run, `first_start` where it begins; `desired_state` and
`reset_pipeline` carry out what people ask for; `publication` is what Dagster should be told, `retention` what may be
deleted, `backpressure` keeps the journal within its limit; `specs`, `code_versions` and `spec_changes` remember and
compare pipeline files.
"""
