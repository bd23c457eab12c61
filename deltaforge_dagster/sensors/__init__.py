"""Dagster sensors and schedules: those of each pipeline, alerts, and retention as a job."""
