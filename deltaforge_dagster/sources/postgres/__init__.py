"""PostgreSQL: the replication stream of one slot, decoded from pgoutput.

`source` is the interface to the run; `source_type` is that to everything else: options, positions
(`position`) and names. `preflight` inspects the server, `warm` compiles the kernels. The folders,
in the order in which a change passes through them:

- `connection`: logins, the server's identity and its catalogs;
- `stream`: the replication stream, its slot and publication;
- `decode`: the two kernels (`decode.scan` finds changes, `decode.rows` writes images;
  `decode.pgoutput` draws the formats), the decoder that makes change batches from both, table
  versions, and values that the log lacks (`decode.toast_reselect`);
- `snapshot`: whole tables, read in chunks with COPY.
"""
