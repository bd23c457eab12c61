"""Registers the schemas of messages: `client` asks a registry, `sink` writes ids into messages, `preflight` looks before a run."""
