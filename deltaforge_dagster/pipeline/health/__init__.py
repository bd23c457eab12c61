"""Whether a pipeline works, and whether its source and sinks are set up as it needs.

`health` is the one answer that every surface gives; `source_watch` and `dead_letter_watch` collect
what it is derived from. `gaps` says which sinks lack rows because the source's log lacks them.
`source_preflight` and `sink_preflight` inspect the servers before a run, `old_files` what the state
store knows of lake tables.
"""
