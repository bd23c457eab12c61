"""Whether a pipeline works, and whether its source and sinks are set up as it needs.

`health` is the one answer that every surface gives. It is derived from what runs and ticks have
`recorded`; `source_watch` and `undelivered` collect how the source is, and what sinks do not get.
`preflight` inspects the servers, the journal and what the state store knows of lake tables.
"""
