"""Decisions about pipelines, for sensors, commands, the API and the run.

`catalog` lists the pipelines, `work` determines whether one needs a run, `first_start` where it
begins; `desired_state` and `reset_pipeline` carry out requests of users; `publication` determines
what to publish in Dagster, `retention` what may be deleted; `backpressure` keeps the journal within
its limit; `specs`, `code_versions` and `spec_changes` store and compare pipeline files.
"""
