"""What sinks that keep tables have in common: options, the staged changes that they get, and what writes these.

`config` has the options, `staged` the form in which Spark's tasks leave the changes of a commit, and `writer` the interface
to what applies them to a table. `pipeline.tables` decides what a commit covers, and has it staged and written.
"""
