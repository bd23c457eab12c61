"""DataFrame transformations of the change frame: the processor chain, routing, envelopes."""
