"""Compares tables of sinks with the source, while both go on.

`compare` compares one table of a sink, window by window. A window is a chunk of the source's table
as a snapshot reads it, with the read view and the position of the read. `expected` stages its rows,
and the changes after the read view up to the segment that the sink's table has, as a commit would
stage them. The sink applies them to an empty table of its own and compares
(`sinks.tables.comparer`). `journal_reach` tells since which segment the journal has everything that
a read saw; before, a difference proves nothing. `obstacles` says why a table cannot be compared,
`reports` describes the result.
"""
