"""The Redis sink: blocks of XADD commands, packed by `resp` and sent over a `link`.

`resp` also reads the replies. `cluster` has the servers: one, or the nodes of a cluster.
"""
