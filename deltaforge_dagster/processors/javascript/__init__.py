"""The JavaScript processor, which runs a user's script in V8 (`script`).

`spelling` finds numbers that JavaScript would spell differently.
"""
