"""Formats and meaning of events in the binary log that are not rows."""
