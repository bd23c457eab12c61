"""Rows of captured changes on their way into the change frame: shared by every source.

`texts` is the memory into which kernels write images and keys, `arrays` makes Arrow columns from
it, `columns`, `hiding` and the kernel `hidden_values` apply column rules, `images` merges
incomplete images, `event_ids` computes event ids.
"""
