"""`spec.processors`: the processors of a pipeline file, those of installed packages, and checks of SQL expressions."""
