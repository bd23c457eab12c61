"""The HTTP sink: each change, or a batch of changes, is a request to a URL.

`sink` is the sink, `requests` builds the requests of a batch, `flight` runs them, several at once,
and keeps the order of each key, `client` makes one request and `answers` judges its response, and
`network` connects.
"""
