"""The NATS sink: chains of messages (`session`), sent over a `link`.

`pack` and `commands` pack them, and `answers` reads the server's answers. `allowed` checks subjects
against the stream, and `stream` reads the stream's configuration and the sink's position.
"""
