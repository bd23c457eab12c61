"""MySQL and MariaDB: the binary log, read as a replica reads it.

`source` is the interface to the run; `source_type` is that to everything else: options, names,
positions and GTIDs (`position`). `preflight` inspects the server, `warm` compiles the kernels. The
folders, in the order in which a change passes through them:

- `connection`: logins, the server's identity and what it says about its log;
- `stream`: the dump of the log, sections of a long log, and quick scans;
- `events`: the formats of events in the log (`events.binlog` draws them), and statements;
- `decode`: the two kernels (`decode.scan` finds changes, `decode.rows` writes images), and the
  decoder that makes change batches from both;
- `values`: single values as JSON text, character sets;
- `schema`: table versions, and the statements that change tables;
- `snapshot`: whole tables, read in chunks.
"""
