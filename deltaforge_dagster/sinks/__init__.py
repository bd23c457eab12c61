"""Sinks: one folder per kind of destination.

Sinks that get messages are behind the protocol in `base`. `registry` says what a kind is and finds
the kinds, each of which is described in `<kind>/sink_type.py`, with its options (`lake` has two
kinds, and its options in `lake.config`). `build` makes the sinks of a pipeline file, and
`connections` has what several kinds share. `schema_registry` is for sinks whose messages are Avro.
"""
