"""Decisions about pipelines, for sensors, commands, the API and the run.

`catalog` lists the pipelines, `work` determines whether one needs a run, `first_start` where it
begins; `user_requests` carries out what users request; `closed_ranges` finds the ranges and what to
publish of them in Dagster; `journal_space` determines what may be deleted, and keeps the journal
within its limit; `specs` and `spec_changes` store and compare pipeline files.
"""
