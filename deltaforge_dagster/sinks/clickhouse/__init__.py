"""Tables of ClickHouse.

`config` and `sink_type` describe the kind. `client` speaks ClickHouse's HTTP interface, and
`errors` translates its exceptions. `types` maps column types, and `versions` computes the versions
of rows. `target` finds or creates a table, `rows` converts staged rows to the rows that are
inserted, and `writer` applies the changes of a commit, with `inserts` and `staging`.
"""
