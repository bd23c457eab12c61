"""The processors of a pipeline file (spec.processors), those of installed packages, and checks of SQL expressions."""
