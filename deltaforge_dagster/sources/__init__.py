"""Sources: one package per database, all behind `base`.

`registry` finds the kinds, ours and those of other packages. What sources share, in the order in
which a change meets it:

- `stream`: the socket and the read buffer of a log;
- `rows`: columns and images of rows, column rules, event ids;
- `tables` and `outbox`: what is captured; `findings`: what an inspection of a server found;
- `snapshot`: the other interface: tables read in chunks.

The kernels that write values as JSON text are in `kernels`.
"""
