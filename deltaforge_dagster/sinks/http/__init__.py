"""The HTTP sink: each change, or a batch of changes, is a request to a URL.

`requests` builds the requests of a batch and judges their responses, `sink` runs them, several at
once, and keeps the order of each key, and `client` makes one request.
"""
