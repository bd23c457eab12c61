"""Kernels: plain Python functions that Numba compiles to machine code.

They do work on bytes that is too slow in Python. `runtime` says what a kernel may do, `compiler`
compiles it at its first call. Kernels of general use: `json_text` and `json_bytes` write JSON,
`json_fields` finds members in JSON text and `json_strings` reads strings, `sha256` hashes,
`text_columns` and `message_text` read and build columns of text, `avro_bytes` builds Avro records.
Kernels for one database or sink are next to the code that calls them.
"""
