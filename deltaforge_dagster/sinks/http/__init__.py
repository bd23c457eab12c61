"""The HTTP sink: each change, or a batch of changes, is a request to a URL.

`sink` is the sink, `requests` makes the requests of a batch, `flight` has several of them under way and keeps the order of a key,
`client` makes a request and `answers` judges its response, `network` connects.
"""
