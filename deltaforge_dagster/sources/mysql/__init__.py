"""MySQL and MariaDB: the binary log, read as a replica reads it.

`source` is what the run sees. From bytes to changes: `dump` asks for the log, `decoder` takes it in pieces.
The first kernel notes what is in a piece (`scan`, `scan_rows`; formats are drawn in `binlog`, shapes of its
notes in `layout`, why it stops in `stops`), the second writes row images (`rows`, and for single values
`values`, `scalars`, `texts`, `floats`, `json_binary`), and `transaction_assembler` and `batches` make change batches of
both. What else stands in a log:

- statements, XA and events inside others: `non_row_events`, with `statements`, `ddl`, `prepared`, `nested_events`,
  `payload`, `partial_json`, `mariadb_events`;
- tables: `table_map` and `versions`; where the log does not say their columns, `catalog` and `definitions`;
- what cannot be decoded yet: `held` and `held_decoder`.

About the server: `connection`, `server_log`, `mariadb_log`, `identity`, `preflight`, `peek`, `log_scan`.
Long backlogs are divided by `section_planner` and `log_sections`. Tables themselves are read by `snapshot`, in `chunks`
(`selected`, `result_rows`, `result_text`). `samples`, `synthetic_log` and `type_families` make logs without a server.
"""
