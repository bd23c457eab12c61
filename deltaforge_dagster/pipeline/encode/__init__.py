"""Encoding: segments of the journal become messages, once for all sinks.

`encoder` runs the Spark job, whose tasks call `messages` and write `files`; `cache` decides which
segments one job covers and shares the result; `segments` hands each deliverer its messages.
"""
