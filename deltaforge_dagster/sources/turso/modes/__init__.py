"""How changes are found: `native`, `triggers` or `polling`; `mode` chooses, `readings` is what they share."""
