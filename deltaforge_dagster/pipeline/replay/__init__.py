"""Work on closed ranges that needs no lease and moves no checkpoint or position.

`closed_ranges` finds them, `replay` delivers them to one sink again, `reprocessing` runs today's
processors over them, `preview` and `comparison` show what changed processors would make of them,
`recapture` compares them with the source's log, and `key_search` finds the changes of a row.
"""
