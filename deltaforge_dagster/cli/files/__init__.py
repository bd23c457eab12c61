"""Commands about pipeline files: their meaning, what they change, whether servers are ready."""
