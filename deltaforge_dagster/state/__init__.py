"""The state store: tables of the run, the fenced write, the four primitives, schemas."""
