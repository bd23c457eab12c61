"""How changes are found: `native`, `triggers` or `polling`; `mode` chooses one of them.

`readings` has the common interfaces.
"""
