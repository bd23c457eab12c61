"""The NATS sink: chains of messages (`session`), packed by `pack` and `commands`, sent over a `link`.

`answers` reads the server's answers; `allowed` checks subjects against the stream, and `stream`
reads the stream's configuration and the sink's position.
"""
