"""Kernels: plain Python functions that Numba compiles to machine code.

They do work on bytes that is too slow in Python. `runtime` says what a kernel may do, `compiler`
compiles it at its first call. Kernels of general use: `json_text` writes values as JSON,
`json_strings` writes and reads strings, `json_fields` finds members in JSON text, `sha256` hashes,
`message_text` builds and reads columns of text, `avro_bytes` builds Avro records. Kernels for one
database or sink are next to the code that calls them.
"""
