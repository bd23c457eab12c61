"""Turn changes into messages.

`expansion` makes several messages of one change, `envelope` builds the JSON values, `avro` the Avro
values, and `routing` computes destinations and keys.
"""
