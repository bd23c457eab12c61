"""A shop's pipeline, and what is made of its tables."""
