"""How changes are found: `native`, `triggers` or `polling`; `mode` chooses, `readings` has the common interfaces."""
