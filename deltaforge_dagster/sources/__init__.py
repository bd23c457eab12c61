"""Sources: one package per database, all behind `base`.

What sources share, in the order in which a change meets it:

- `stream_socket` and `pieces` receive the log; `kernel` says what decodes it, `json_text` and `json_bytes`
  write its values, `hidden_values` and `hiding` apply what `columns` says of them;
- `row_texts` and `arrays` make columns of the change frame, `event_ids` names each change;
- `outbox` and `tables` say what is captured, `findings` what a look at a server found;
- `snapshot` is the other seam: tables read in chunks (`snapshot_rows`), less what `read_views` leaves out.
"""
