"""The source of a pipeline file: `base` has what all kinds share, `snapshot` snapshot options.

The options of a kind are in its own folder, `sources/<kind>/config.py`.
"""
