"""Sinks: one folder per kind of destination.

Sinks that get messages are behind the protocol in `base`. `registry` says what a kind is and finds
the kinds, each of which is described in `<kind>/sink_type.py` (`lake` has two). `build` makes the
sinks of a pipeline file; `preflight`, `deadlines` and `use` are shared. `schema_registry` is for
sinks whose messages are Avro.
"""
