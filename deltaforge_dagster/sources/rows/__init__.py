"""Rows of captured changes on their way into the change frame: shared by every source.

`arrays` has the memory into which kernels write images and keys, and makes Arrow columns from it;
`columns` and `hiding` apply column rules, `images` merges incomplete images, `event_ids` computes
event ids, `snapshot` makes record batches from rows of a snapshot.
"""
