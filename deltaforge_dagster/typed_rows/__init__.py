"""Row images as Arrow tables whose columns have types, for destinations that store columns.

Pure functions of Arrow batches, without Spark or Dagster, to be called in Spark's tasks. `schema`
says which columns a table version has, and of which types; `tables` decodes row images, and those
of a change frame, one table version at a time. `columns` makes one column of the texts of its
values, which `cells` finds, with the kernels `numbers`, `times` and `texts`.

A value is exactly what the source has, or it does not fit: nothing is rounded, clipped or replaced
(docs/typed-rows.md).
"""
