"""The JavaScript processor: a user's `script` in V8; `spelling` finds numbers that JavaScript would spell differently."""
