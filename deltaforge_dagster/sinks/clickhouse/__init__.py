"""Tables of ClickHouse.

`config` and `sink_type` describe the kind. `client` speaks ClickHouse's HTTP interface, and `errors` translates its
exceptions. `types` says what a column is there, `versions` what a row's version is. `target` finds a table or makes it,
`rows` makes of staged rows what is inserted, and `writer` applies the changes of a commit.
"""
