"""The sinks of a pipeline file (spec.sinks).

`base` has the options of every sink, `encoding` how messages are encoded. The options of a kind are
in its own folder, `sinks/<kind>/config.py`.
"""
