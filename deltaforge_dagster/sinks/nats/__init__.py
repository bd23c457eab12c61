"""The NATS sink: chains of messages (`session`), sent over a `link`.

`pack` writes their bytes, and `answers` reads the server's answers. `publish` is a batch on its
way, with the checks before it is sent, and `stream` reads the stream's configuration and the sink's
position.
"""
