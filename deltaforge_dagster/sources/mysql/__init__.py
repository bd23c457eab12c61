"""MySQL and MariaDB: the binary log, read as a replica reads it.

`source` is what the run sees, `source_type` what everything else asks: options (`config`), positions (`position`, `gtid`) and
names. `preflight` inspects the server. The folders, in the order in which a change
meets them:

- `connection`: logins, the server's identity and what it says about its log;
- `stream`: the dump of the log, sections of a long one, quick scans and peeks;
- `events`: the formats of events in the log (`events.binlog` draws them);
- `decode`: the two kernels (`decode.scan` notes changes, `decode.rows` writes images) and what makes change batches of both;
- `values`: single values as JSON text, character sets;
- `schema`: table versions, and the statements that change tables;
- `snapshot`: whole tables, read in chunks;
- `warm` compiles the kernels, by decoding a small sample.
"""
