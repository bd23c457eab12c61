"""Rows of captured changes on their way into the change frame: shared by every source.

`texts` is the memory into which kernels write images and keys, `arrays` makes Arrow columns of it, `columns`, `hiding`
and the kernel `hidden_values` apply column rules, `images` merges images that are not whole, `event_ids` names changes.
"""
