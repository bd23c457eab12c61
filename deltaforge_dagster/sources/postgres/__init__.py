"""PostgreSQL: the replication stream of one slot, decoded from pgoutput.

`source` is what the run sees. From bytes to changes: `stream` receives, `decoder` takes it in pieces. The
first kernel notes what is in a piece (`scan`; formats are drawn in `pgoutput`, shapes of its notes in
`layout`), the second writes row images (`tuples`, with `values` and `array_text`; `fills`, `unchanged_toast` and
`reselect` for values that the log lacks), and `batches` makes record batches of both, with the table
versions of `relations`. What cannot be decoded yet is `held`; other applications' messages are `messages`.

About the server: `connection`, `handshake`, `slots`, `publications`, `slot_setup`, `stream_errors`, `heartbeat`,
`catalog`, `identity`, `preflight`. Tables themselves are read by `snapshot`, in `chunks`, as `watermark`
demands (`copied`, `libpq_lines`, `copy_text`, `selected`). `samples`, `synthetic_log` and `type_families` make streams
without a server.
"""
