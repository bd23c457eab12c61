"""The processors of a pipeline file (spec.processors), and checks of SQL expressions.

Installed packages may add processors.
"""
