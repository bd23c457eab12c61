"""What sinks that keep tables share: options, the form of staged changes, and the writer.

`config` has the options, `staged` describes the files in which Spark's tasks leave the changes of a
commit, and `writer` is the interface that applies them to a table. `pipeline.tables` decides what a
commit covers, and has it staged and written.
"""
