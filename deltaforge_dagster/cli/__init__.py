"""The `deltaforge` command."""
