"""The Redis sink: blocks of XADD commands, packed by `resp` and sent over a `link`.

`resp_replies` reads the replies. `cluster` handles clusters, with one `node` for each server.
"""
