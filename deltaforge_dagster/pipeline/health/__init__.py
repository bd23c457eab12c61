"""Whether a pipeline works, and whether its source and sinks are as it needs them.

`health` is the one answer that every surface gives; `source_watch` and `dead_letter_watch` collect what it is derived
from; `source_preflight` and `sink_preflight` inspect the servers before a run, `old_files` what the state store knows of lake tables.
"""
