"""The source of a pipeline file: `base` has what every kind shares, `snapshot` the options of snapshots.

The options of a kind are in its own folder, `sources/<kind>/config.py`.
"""
