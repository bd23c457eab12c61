"""The file sink: JSON lines."""
