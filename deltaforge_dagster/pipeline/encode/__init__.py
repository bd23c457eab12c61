"""Encoding: segments of the journal become messages, once for all sinks.

`encoder` runs the Spark job, whose tasks call `messages` and write `files`; `cache` decides which
segments one job covers and shares the result; `segments` hands each deliverer its messages, as
`selection` picks them; `versions` has the table versions that messages in Avro need; `probe` checks
a Spark server that is not our own.
"""
