"""Commands about pipeline files: what they mean, what they change, whether the servers are ready for them."""
