"""Registers the schemas of messages.

`client` asks a registry, `sink` writes ids into messages, and `preflight` checks before a run.
"""
