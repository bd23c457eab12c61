"""Dagster sensors and schedules: the sensor or schedule of each pipeline, alerts, and retention as a scheduled job."""
