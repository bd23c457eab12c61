"""The replication stream (`replication`), and its slot, publication and heartbeats."""
