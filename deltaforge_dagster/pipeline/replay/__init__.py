"""Work on closed ranges that needs no lease and moves no checkpoint or position.

`replay` delivers them to one sink again, as recorded or reprocessed by today's processors,
`preview` and `comparison` show what changed processors would make of them, `recapture` compares
them with the source's log, and `key_search` finds the changes of a row.
"""
