"""Tables of ClickHouse.

`sink_type` describes the kind, with its options. `client` speaks ClickHouse's HTTP interface.
`target` finds or creates a table, and maps column types. `rows` converts staged rows to the rows
that are inserted, and computes their versions; `staging` inserts them. `writer` applies the changes
of a commit.
"""
