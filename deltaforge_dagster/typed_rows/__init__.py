"""Row images as Arrow tables whose columns have types, for destinations that store columns.

Pure functions of Arrow batches, without Spark or Dagster, to be called in Spark's tasks. `schema`
says which columns a table version has, and of which types; `rows` decodes row images, `tables`
those of a change frame, one table version at a time. `columns` makes one column of the texts of its
values, with the kernels `members`, `numbers`, `times` and `texts`, and with `exact` for forms that
are too rare for a kernel. `cells` has what all of them share.

A value is exactly what the source has, or it does not fit: nothing is rounded, clipped or replaced
(docs/typed-rows.md).
"""
