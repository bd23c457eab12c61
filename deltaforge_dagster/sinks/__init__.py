"""Sinks: one folder per destination, all behind the protocol in `base`.

`build` makes the sinks of a pipeline file; `deadlines` and `use` are shared.
"""
