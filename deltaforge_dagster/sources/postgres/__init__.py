"""PostgreSQL: the replication stream of one slot, decoded from pgoutput.

`source` is what the run sees, `source_type` what everything else asks: options (`config`), positions (`position`) and
names. `preflight` inspects the server. The folders, in the order in which a change
meets them:

- `connection`: logins, the server's identity and its catalogs;
- `stream`: the replication stream, its slot and publication;
- `decode`: the two kernels (`decode.scan` notes changes, `decode.rows` writes images) and what makes change batches of both
  (`decode.pgoutput` draws the formats), values that the log lacks (`decode.unchanged_toast`, `decode.toast_reselect`), table versions;
- `snapshot`: whole tables, read in chunks with COPY;
- `warm` compiles the kernels, by decoding a small sample.
"""
