"""The reader of a slot (`slot_reader`) and its stream (`replication`); slots and publications."""
